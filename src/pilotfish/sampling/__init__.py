"""From logits to tokens: pure functions over rows of logits, shared by plain decoding and every speculation scheme.

One :class:`SamplerState` a completion holds what its parameters need; one :class:`LogitsRow` says which position of
it a row of logits belongs to. :func:`sample` chooses tokens, :func:`process_logits` and :func:`softmax_probs` give the
distribution that they are chosen from.
"""

from pilotfish.sampling.process import process_logits, softmax_probs
from pilotfish.sampling.sampler import SampleResult, sample
from pilotfish.sampling.state import LogitsRow, SamplerState

__all__ = ["LogitsRow", "SampleResult", "SamplerState", "process_logits", "sample", "softmax_probs"]
