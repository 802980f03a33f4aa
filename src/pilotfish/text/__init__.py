"""Text to tokens and back: tokenizer and chat template, incremental detokenizer, stop strings."""

from pilotfish.text.detokenizer import Detokenizer
from pilotfish.text.stop import StopStringMatcher
from pilotfish.text.tokenizer import Message, Tokenizer

__all__ = ["Detokenizer", "Message", "StopStringMatcher", "Tokenizer"]
