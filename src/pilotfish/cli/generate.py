"""One prompt, its output on stdout as it comes, and beside it the same without speculation if that is asked for."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from pilotfish.cli.paint import DRAFT_COLOUR, Painter, wants_colour
from pilotfish.cli.render import output_json, stats_line, to_json
from pilotfish.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pilotfish.llm import LLM

__all__ = ["Comparison", "run_generate"]

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same request with and without speculation."""

    output: RequestOutput
    plain: RequestOutput

    @property
    def ratio(self) -> float | None:
        """Tokens/s with speculation over tokens/s without; None where either is unknown (below two tokens)."""
        ours, plain = self.output.stats.tokens_per_second, self.plain.stats.tokens_per_second
        return ours / plain if ours and plain else None

    @property
    def identical(self) -> bool:
        """Whether every completion has the same tokens."""
        return [c.token_ids for c in self.output.outputs] == [c.token_ids for c in self.plain.outputs]

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        speed = self.plain.stats.tokens_per_second
        return {"tokens_per_second": speed, "ratio": self.ratio, "identical": self.identical}

    def line(self) -> str:
        """Such as "without speculation: 75.0 tokens/s, ratio 1.61, outputs identical"."""
        speed, ratio = self.plain.stats.tokens_per_second, self.ratio
        parts = ["too few tokens to time" if speed is None else f"{speed:.1f} tokens/s"]
        if ratio is not None:
            parts.append(f"ratio {ratio:.2f}")
        parts.append("outputs identical" if self.identical else "outputs differ")
        return "without speculation: " + ", ".join(parts)


def run_generate(llm: LLM, plain: LLM | None, token_ids: list[int], params: SamplingParams, *, as_json: bool) -> None:
    """Generate and print.

    Args:
        llm: makes the output.
        plain: makes the output to compare with. An engine of its own: a draft model costs time in its engine even for
            a request that does not speculate, because it follows every sequence.
        token_ids: the prompt.
        params: of the request. With ``plain`` a missing seed is drawn here, so that both get the same.
        as_json: one JSON object instead of text.
    """
    if plain is not None:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        for engine in (llm, plain):
            _warm_up(engine, token_ids)
    coloured = llm.engine.config.speculation is not None and wants_colour(sys.stdout)
    output = _stream(llm, token_ids, params, show=not as_json, coloured=coloured)
    comparison = Comparison(output, plain.generate(token_ids, params)[0]) if plain is not None else None
    if as_json:
        result = output_json(output, llm.tokenizer.token_text)
        if comparison is not None:
            result["compare"] = comparison.as_dict()
        typer.echo(to_json(result))
        return
    typer.echo(stats_line(output) + (f" ({DRAFT_COLOUR}: accepted drafts)" if coloured else ""), err=True)
    if comparison is not None:
        typer.echo(comparison.line(), err=True)


def _stream(llm: LLM, token_ids: list[int], params: SamplingParams, *, show: bool, coloured: bool) -> RequestOutput:
    """The finished output; shown as it comes where it is one completion, afterwards where there are several."""
    painter = Painter(coloured=coloured)
    output: RequestOutput | None = None
    for piece in llm.stream(token_ids, params):
        output = piece.output
        if show and params.n == 1:
            _write(painter.new_text(output.outputs[0]))
    assert output is not None
    if show and params.n == 1:
        _write("\n")
    elif show:
        for completion in output.outputs:
            text = Painter(coloured=coloured).new_text(completion)
            _write(f"--- {completion.index + 1} of {params.n}\n{text}\n")
    return output


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _warm_up(llm: LLM, token_ids: list[int]) -> None:
    """First use costs once what must not count for either: pages that were never touched, sleeping threads."""
    room = llm.engine.max_model_len - 1
    llm.generate(token_ids[:1], SamplingParams(temperature=0.0, max_tokens=min(_WARM_UP_TOKENS, room), ignore_eos=True))
