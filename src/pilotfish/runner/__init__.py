"""From scheduled sequences to logits: batch assembly, attention plan, model forward, choice of rows."""

from pilotfish.runner.batch import BatchBuilder, Segment
from pilotfish.runner.head import EagerHeadRunner, HeadRunner, HeadStep
from pilotfish.runner.runner import EagerRunner, Runner

__all__ = ["BatchBuilder", "EagerHeadRunner", "EagerRunner", "HeadRunner", "HeadStep", "Runner", "Segment"]
