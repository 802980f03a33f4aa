"""LLM over an engine without a model: order, errors, streams, aborts."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest

from fake_llm import Letters, make_llm
from fakes import EOS, make_engine
from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError, RequestError
from pilotfish.llm import LLM, EngineSettings
from pilotfish.types import RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def summary(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


def idle(llm: LLM) -> bool:
    return not llm.engine.has_unfinished and llm.engine.pool.num_free == make_engine().pool.num_free


def test_outputs_come_in_order_and_equal_single_runs() -> None:
    llm = make_llm(max_num_seqs=3)
    prompts = ["hello", "a", "pilotfish", "bb", "swim"]
    lengths = [
        GREEDY,
        dataclasses.replace(GREEDY, max_tokens=1),
        GREEDY,
        dataclasses.replace(GREEDY, max_tokens=9),
        GREEDY,
    ]
    outputs = llm.generate(prompts, lengths)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 1, 6, 9, 6]
    for prompt, params, output in zip(prompts, lengths, outputs, strict=True):
        assert output.finished
        assert output.error is None
        assert summary(make_llm().generate(prompt, params)[0]) == summary(output)
    assert idle(llm)


def test_text_and_token_ids_are_the_same_prompt() -> None:
    llm = make_llm()
    text, flat, nested = llm.generate("abc", GREEDY), llm.generate([0, 1, 2], GREEDY), llm.generate([[0, 1, 2]], GREEDY)
    assert summary(text[0]) == summary(flat[0]) == summary(nested[0])
    assert flat[0].prompt is None
    assert flat[0].prompt_token_ids == [0, 1, 2]


def test_default_parameters_are_vllms() -> None:
    [output] = make_llm(seed=3).generate("abc")
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert len(output.outputs[0].token_ids) <= 16


def test_no_prompts_give_no_outputs() -> None:
    assert make_llm().generate([]) == []
    assert make_llm().chat([]) == []


def test_a_bad_prompt_in_a_list_fails_alone() -> None:
    llm = make_llm()
    outputs = llm.generate(["abc", "", "a" * 60, "\u00e9", [0, 99], "abc"], GREEDY)  # type: ignore[list-item]
    errors = [output.error for output in outputs]
    assert [error is None for error in errors] == [True, False, False, False, False, True]
    assert all(isinstance(error, RequestError) for error in errors[1:5])
    assert all(output.finished and output.outputs == [] for output in outputs[1:5])
    assert summary(outputs[0]) == summary(outputs[5]) == summary(make_llm().generate("abc", GREEDY)[0])
    assert idle(llm)


@pytest.mark.parametrize("prompt", ["", "a" * 60, "\u00e9", [0, 99], 5, b"abc", None])
def test_a_single_bad_prompt_raises(prompt: Any) -> None:
    llm = make_llm()
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)
    assert idle(llm)


@pytest.mark.parametrize("messages", ["hi", None, 5])
def test_messages_that_are_no_conversation_raise(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        make_llm().chat(messages, GREEDY)


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, "greedy", 3])
def test_parameters_that_do_not_fit_the_prompts_are_errors(params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        make_llm().generate(["a", "b"], params)


def test_chat_takes_one_conversation_or_several() -> None:
    llm = make_llm()
    conversation = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(conversation, GREEDY)
    assert one.prompt_token_ids == Letters().encode("uhia")
    assert one.prompt == "uhia"
    several = llm.chat([conversation, [{"role": "user", "content": "\u00e9"}]], GREEDY)
    assert summary(several[0]) == summary(one)
    assert isinstance(several[1].error, RequestError)
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": "\u00e9"}], GREEDY)


@pytest.mark.parametrize("n", [1, 3])
def test_stream_pieces_add_up(n: int) -> None:
    params = SamplingParams(n=n, seed=5, max_tokens=12, stop=["ab", "q"], ignore_eos=True)
    [whole] = make_llm().generate("hello", params)
    llm = make_llm()
    texts, tokens = [""] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
    for piece in llm.stream("hello", params):
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
    assert piece.output.finished
    assert summary(piece.output) == summary(whole)
    assert texts == [completion.text for completion in whole.outputs]
    assert tokens == [completion.token_ids for completion in whole.outputs]
    assert idle(llm)


def test_stream_takes_conversations_and_token_ids() -> None:
    llm = make_llm()
    conversation = [{"role": "user", "content": "hi"}]
    for prompt in (conversation, "uhia", Letters().encode("uhia")):
        *_, last = llm.stream(prompt, GREEDY)
        assert summary(last.output) == summary(llm.chat(conversation, GREEDY)[0])


def test_closing_a_stream_aborts_its_request() -> None:
    llm = make_llm()
    stream = llm.stream("hello", GREEDY)
    piece = next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert piece.output.outputs[0].finish_reason == "abort"
    assert idle(llm)


def test_a_stream_that_is_never_read_costs_nothing() -> None:
    llm = make_llm()
    llm.stream("hello", GREEDY).close()
    assert idle(llm)


def test_a_bad_stream_raises_at_its_first_piece() -> None:
    llm = make_llm()
    with pytest.raises(RequestError):
        next(llm.stream("", GREEDY))
    assert idle(llm)


def test_streams_and_batches_interleave() -> None:
    llm = make_llm()
    stream = llm.stream("hello", GREEDY)
    first = next(stream)
    [other] = llm.generate(["swim"], dataclasses.replace(GREEDY, max_tokens=20))  # the stream ends meanwhile
    rest = list(stream)
    assert first.text + "".join(piece.text for piece in rest) == make_llm().generate("hello", GREEDY)[0].outputs[0].text
    assert summary(other) == summary(make_llm().generate("swim", dataclasses.replace(GREEDY, max_tokens=20))[0])


def test_an_interrupted_batch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    step, steps = llm.engine.step, iter(range(3))

    def interrupted() -> list[RequestOutput]:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "swim"], GREEDY)
    assert idle(llm)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    make_llm().generate(["hello", "swim"], GREEDY, use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_settings_are_the_engine_configs() -> None:
    """Same names, same types: a new setting cannot be forgotten here."""
    assert get_type_hints(EngineSettings) == get_type_hints(EngineConfig)


def test_unknown_and_bad_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"max_seqs.*max_num_seqs"):
        LLM(max_seqs=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="dtype"):
        LLM(dtype="float8")  # type: ignore[arg-type]


def test_eos_ends_the_text_without_it() -> None:
    [output] = make_llm(eos_bias=100.0).generate("abc", dataclasses.replace(GREEDY, ignore_eos=False))
    assert summary(output) == [(0, "", [EOS], "stop", None)]
