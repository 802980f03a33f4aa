"""Structured output: which tokens a grammar allows at a position of a completion, drafts before it included.

A :class:`GrammarCompiler` turns what a request asks for into a :class:`Grammar`, once for all requests that ask for the
same. Each completion has a :class:`GrammarMatcher` of its own. Parsing and masks are llguidance's, on the host.
"""

from pilotfish.grammar.compiler import MAX_SOURCE_BYTES, Grammar, GrammarCompiler
from pilotfish.grammar.matcher import GrammarMatcher

__all__ = ["MAX_SOURCE_BYTES", "Grammar", "GrammarCompiler", "GrammarMatcher"]
