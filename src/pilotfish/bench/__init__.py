"""Speculation schemes measured beside plain decoding, in turn within one run: what ``pilotfish bench`` does."""

from pilotfish.bench.questions import Question, load_questions, take
from pilotfish.bench.records import Group, Measured, Run
from pilotfish.bench.run import Prompt, encode_prompts, measure, plan_groups, run_batch, warm_up
from pilotfish.bench.summary import OVERALL, Summary, summarise

__all__ = [
    "OVERALL",
    "Group",
    "Measured",
    "Prompt",
    "Question",
    "Run",
    "Summary",
    "encode_prompts",
    "load_questions",
    "measure",
    "plan_groups",
    "run_batch",
    "summarise",
    "take",
    "warm_up",
]
