"""Attention over a paged KV pool: a plan per forward pass, a run per layer."""

from pilotfish.attention.base import AttentionBackend, AttentionPlan, ForwardBatch, KVShape, RopeTable

__all__ = ["AttentionBackend", "AttentionPlan", "ForwardBatch", "KVShape", "RopeTable"]
