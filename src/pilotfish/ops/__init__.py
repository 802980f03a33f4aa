"""The op set that models and the sampler are written in, and its backends."""

from pilotfish.ops.base import Linear, NoiseKeys, Ops

__all__ = ["Linear", "NoiseKeys", "Ops"]
