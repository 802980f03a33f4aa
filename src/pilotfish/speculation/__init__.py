"""Speculation schemes: one module a scheme, one seam for all."""

from pilotfish.speculation.base import NoProposer, Proposal, ProposalRow, Proposer, Verdict, accept_chain

__all__ = ["NoProposer", "Proposal", "ProposalRow", "Proposer", "Verdict", "accept_chain"]
