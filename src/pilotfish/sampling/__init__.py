"""From logits to tokens: pure functions over rows of logits, shared by plain decoding and every speculation scheme.

One :class:`SamplerState` a completion holds what its parameters need; one :class:`LogitsRow` says which position of
it a row of logits belongs to. :func:`sample` chooses tokens, :func:`process_logits` and :func:`softmax_probs` give the
distribution that they are chosen from, :mod:`pilotfish.sampling.accept` says which drafts are kept.
"""

from pilotfish.sampling.accept import Verdict, accept_chain, accept_tree, reject_chain, reject_tree, threshold_chain
from pilotfish.sampling.process import choose, process_logits, softmax_probs
from pilotfish.sampling.sampler import SampleResult, logprobs_of, noise_keys, sample
from pilotfish.sampling.state import Constraint, LogitsRow, SamplerState, check_vocabulary

__all__ = [
    "Constraint",
    "LogitsRow",
    "SampleResult",
    "SamplerState",
    "Verdict",
    "accept_chain",
    "accept_tree",
    "check_vocabulary",
    "choose",
    "logprobs_of",
    "noise_keys",
    "process_logits",
    "reject_chain",
    "reject_tree",
    "sample",
    "softmax_probs",
    "threshold_chain",
]
