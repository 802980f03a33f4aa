"""The command line, over an engine without a model: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import pilotfish
from fake_llm import Letters, make_llm
from pilotfish.cli.app import app, run
from pilotfish.cli.options import ModelOptions, SamplingOptions, parse_size
from pilotfish.cli.render import to_json
from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError
from pilotfish.llm import LLM
from pilotfish.types import SamplingParams

Output = pytest.CaptureFixture[str]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The model that every command of the test loads."""
    fake = make_llm()
    monkeypatch.setattr("pilotfish.cli.session.load_llm", lambda options, speculation=None: fake)
    monkeypatch.setattr("pilotfish.cli.chat.load_llm", lambda options, speculation=None: fake)
    return fake


def expected(text: str, **params: Any) -> Any:
    defaults = {"temperature": 0.0, "max_tokens": 8}
    return make_llm().generate(Letters().encode(text), SamplingParams(**defaults | params))[0]


def generate_json(capsys: Output, *args: str) -> dict[str, Any]:
    assert run(["generate", "hello", "--no-chat", "--max-tokens", "8", "--json", *args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    result: dict[str, Any] = json.loads(captured.out)
    return result


def test_generate_prints_the_text_and_a_line_of_statistics(llm: LLM, capsys: Output) -> None:
    assert run(["generate", "hello", "--no-chat", "--max-tokens", "8", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected("hello", ignore_eos=True).outputs[0].text + "\n"
    assert captured.err.startswith("8 tokens, TTFT ")
    assert captured.err.count("\n") == 1


def test_the_chat_template_is_the_default_where_there_is_one(
    llm: LLM, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", "hi", "--max-tokens", "8", "--json"]

    def prompt_tokens(*more: str) -> int:
        assert run([*args, *more]) == 0
        return int(json.loads(capsys.readouterr().out)["prompt_tokens"])

    assert prompt_tokens() == len("uhia")
    assert prompt_tokens("--chat", "--system", "be") == len("sbeuhia")
    assert prompt_tokens("--no-chat") == len("hi")
    monkeypatch.setattr(Letters, "has_chat_template", False)
    assert prompt_tokens() == len("hi")


def test_json_has_the_promised_keys(llm: LLM, capsys: Output) -> None:
    result = generate_json(capsys, "--ignore-eos")
    output = expected("hello", ignore_eos=True)
    stats = result.pop("stats")
    assert result == {
        "text": output.outputs[0].text,
        "token_ids": output.outputs[0].token_ids,
        "finish_reason": "length",
        "prompt_tokens": 5,
        "completion_tokens": 8,
    }
    assert set(stats) == {"ttft_ms", "itl_ms_p50", "tokens_per_second", "num_steps", "speculation"}
    assert stats["speculation"]["scheme"] == "none"
    assert stats["speculation"]["num_drafted"] == 0
    assert stats["num_steps"] == 8
    assert stats["ttft_ms"] > 0


def test_json_with_several_completions_and_logprobs(llm: LLM, capsys: Output) -> None:
    flags = ["--n", "3", "--temperature", "1", "--seed", "4", "--logprobs", "2", "--ignore-eos"]
    result = generate_json(capsys, *flags)
    output = expected("hello", n=3, temperature=1.0, seed=4, logprobs=2, ignore_eos=True)
    assert [choice["token_ids"] for choice in result["choices"]] == [c.token_ids for c in output.outputs]
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]
    assert result["completion_tokens"] == 24
    assert result["text"] == result["choices"][0]["text"]
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    first = result["logprobs"][0]
    assert first["token"] == Letters().token_text(first["token_id"])
    assert [entry["rank"] for entry in first["top"]][:2] == [1, 2]
    assert first["logprob"] == pytest.approx(output.outputs[0].logprobs[0][first["token_id"]].logprob)


def test_several_completions_as_text(llm: LLM, capsys: Output) -> None:
    args = ["generate", "hello", "--no-chat", "--max-tokens", "4", "--n", "2", "--temperature", "1", "--seed", "4"]
    assert run(args) == 0
    texts = [c.text for c in expected("hello", n=2, temperature=1.0, seed=4, max_tokens=4).outputs]
    assert capsys.readouterr().out == f"--- 1 of 2\n{texts[0]}\n--- 2 of 2\n{texts[1]}\n"


@pytest.mark.parametrize(
    ("flags", "params"),
    [
        (
            ["--temperature", "0.7", "--seed", "9", "--top-k", "5", "--top-p", "0.9"],
            {"temperature": 0.7, "seed": 9, "top_k": 5, "top_p": 0.9},
        ),
        (["--temperature", "2", "--seed", "-3", "--min-p", "0.1"], {"temperature": 2.0, "seed": -3, "min_p": 0.1}),
        (
            ["--min-tokens", "8", "--stop-token-ids", "3", "--stop-token-ids", "4"],
            {"min_tokens": 8, "stop_token_ids": [3, 4]},
        ),
        (["--stop", "a", "--stop", "b", "--stop", "cd"], {"stop": ["a", "b", "cd"]}),
        (["--logit-bias", "3=50", "--logit-bias", "4=-50.5"], {"logit_bias": {3: 50.0, 4: -50.5}}),
        (
            ["--presence-penalty", "1", "--frequency-penalty", "-1", "--repetition-penalty", "1.5"],
            {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5},
        ),
    ],
)
def test_flags_are_the_sampling_parameters(llm: LLM, capsys: Output, flags: list[str], params: dict[str, Any]) -> None:
    output = expected("hello", **params).outputs[0]
    result = generate_json(capsys, *flags)
    assert (result["token_ids"], result["text"], result["finish_reason"]) == (
        output.token_ids,
        output.text,
        output.finish_reason,
    )


def test_every_option_is_a_setting_with_its_default() -> None:
    sampling = {field.name for field in dataclasses.fields(SamplingOptions)}
    assert {field.name for field in dataclasses.fields(SamplingParams)} - sampling == {
        "n",
        "logprobs",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "speculate",  # a command line has one request: --scheme none is the same
        "num_drafts",  # is the scheme's
        "structured_outputs",  # has options of its own
    }
    assert SamplingOptions().params() == SamplingParams(temperature=0.0, max_tokens=None)
    assert EngineConfig(**ModelOptions().engine_settings()) == EngineConfig()


def test_many_sequences_raise_the_token_budget() -> None:
    config = EngineConfig(**ModelOptions(max_num_seqs=1000, kv_cache_memory="2G").engine_settings())
    assert config.max_num_batched_tokens == 1000
    assert config.kv_cache_memory == 2**31


def test_max_tokens_defaults_to_what_the_context_has_room_for(llm: LLM, capsys: Output) -> None:
    assert run(["generate", "hello", "--no-chat", "--json", "--ignore-eos"]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 48 - 5


def test_the_prompt_comes_from_stdin(llm: LLM, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert run(["generate", "-", "--no-chat", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == expected("hello").outputs[0].text + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert run(["generate", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "a" * 60, "--no-chat"], "max_model_len"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "a", "--max-tokens", "4000", "--no-chat"], "max_tokens=4000"),
        (["generate", "a", "--temperature", "nan"], "temperature=nan"),
        (["generate", "a", "--temperature", "warm"], "--temperature"),
        (["generate", "a", "--top-p", "2"], "top_p=2"),
        (["generate", "a", "--stop", ""], "stop"),
        (["generate", "a", "--stop-token-ids", "32"], "stop_token_ids"),
        (["generate", "a", "--logit-bias", "3"], "ID=VALUE"),
        (["generate", "a", "--logit-bias", "32=1"], "logit_bias"),
        (["generate", "a", "--logprobs", "3"], "--json"),
        (["generate", "a", "--no-chat", "--system", "b"], "system"),
        (["generate"], "prompt"),
        (["generate", "a", "--no-such-flag"], "--no-such-flag"),
        (["swim"], "swim"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(llm: LLM, capsys: Output, args: list[str], message: str) -> None:
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--threads", "0"], "threads=0"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--kv-cache-memory", "lots"], "kv_cache_memory='lots'"),
        (["--backend", "abacus"], "backend='abacus'"),
    ],
)
def test_bad_engine_settings_are_errors_too(capsys: Output, flags: list[str], message: str) -> None:
    assert run(["generate", "a", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_chat_remembers_resets_and_survives_errors(llm: LLM, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations: list[str] = []
    template = Letters.apply_chat_template

    def recorded(self: Letters, messages: Any) -> list[int]:
        conversations.append(" ".join(message["role"] for message in messages))
        return template(self, messages)

    monkeypatch.setattr(Letters, "apply_chat_template", recorded)
    lines = iter(["hi", "", "/nonsense", "\u00e9", "ho", "/reset", "hey", "/exit", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert run(["chat", "--system", "be", "--max-tokens", "3", "--ignore-eos", "-v"]) == 0
    captured = capsys.readouterr()
    assert conversations == [
        "system user",
        "system user assistant user",  # fails, and is forgotten
        "system user assistant user",
        "system user",
    ]
    answer = expected("sbeuhia", max_tokens=3, ignore_eos=True).outputs[0].text
    assert captured.out.splitlines()[0] == answer
    assert len(captured.out.splitlines()) == 3
    assert "error: letters only" in captured.err
    assert captured.err.count("3 tokens, TTFT") == 3
    assert next(lines) == "never asked"


def test_chat_ctrl_c_stops_the_answer_and_keeps_its_beginning(
    llm: LLM, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = llm.engine.step, iter(range(100))

    def interrupted() -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    lines = iter(["hi"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert run(["chat", "--ignore-eos"]) == 0
    answer = expected("uhia", max_tokens=2, ignore_eos=True).outputs[0].text
    assert capsys.readouterr().out == answer + "\n"
    assert not llm.engine.has_unfinished


def test_chat_needs_a_template(llm: LLM, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "has_chat_template", False)
    assert run(["chat"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_ctrl_c_in_generate_exits_with_130(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    assert run(["generate", "hello"]) == 130
    assert not llm.engine.has_unfinished


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A checkpoint without weights, which `info` does not read."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 7,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "</s>": 7}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


def test_info_counts_what_a_model_costs(model_folder: Path, capsys: Output) -> None:
    assert run(["info", str(model_folder), "--dtype", "float32", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    attention = 32 * (32 + 16 + 16) + (32 + 16 + 16) + 32 * 32
    parameters = 300 * 32 + 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32
    wanted = {
        "supported": True,
        "architecture": "qwen2",
        "parameters": parameters,
        "weight_bytes": 4 * parameters,
        "context_tokens": 128,
        "kv_bytes_per_token": 2 * 2 * 2 * 8 * 4,  # K and V, layers, heads, head dim, bytes
        "eos_token_ids": [7],
        "chat_template": False,
    }
    assert {name: facts[name] for name in wanted} == wanted
    assert run(["info", str(model_folder)]) == 0
    table = capsys.readouterr().out
    assert "kv bytes per token" in table
    assert "no" in table.split("chat template")[1].splitlines()[0]


def test_info_says_why_a_model_is_not_supported(model_folder: Path, capsys: Output) -> None:
    (model_folder / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    assert run(["info", str(model_folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is False
    assert "MambaForCausalLM" in facts["reason"]


@pytest.mark.parametrize("args", [["/no/such/folder"], ["/", "--dtype", "int3"]])
def test_info_of_nothing_is_an_error(args: list[str], capsys: Output) -> None:
    assert run(["info", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("1k", 1024),
        ("512M", 2**29),
        ("2G", 2**31),
        ("1.5GiB", 3 * 2**29),
        ("64MB", 2**26),
        (" 1T ", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("kv_cache_memory", text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "1X", "1GG", "nan", "inf", "1e999", "0.1"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_size("kv_cache_memory", text)


def test_json_is_valid_whatever_the_numbers() -> None:
    values = {"a": [math.nan, -math.inf, 1.5], "b": {"c": math.inf}, "d": "é", "e": True, "f": None}
    assert json.loads(to_json(values)) == {"a": [None, None, 1.5], "b": {"c": None}, "d": "é", "e": True, "f": None}


def test_every_command_has_help_by_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]  # type: ignore[union-attr]
    assert len(commands) > 8
    for command in [[], *([name] for name in commands)]:
        pages = []
        for option in ("-h", "--help"):
            assert run([*command, option]) == 0
            pages.append(capsys.readouterr().out)
        assert pages[0] == pages[1] and "Usage: pilotfish" in pages[0]


def test_help_needs_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys\n"
        "from pilotfish.cli import app\n"
        "from pilotfish.cli.app import run\n"
        "assert run(['--help']) == 0 and run([]) == 0 and run(['generate', '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pilotfish.engine', 'pilotfish.llm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--kv-cache-memory" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"pilotfish {pilotfish.__version__}\n"


def test_output_that_cannot_be_written_is_one_line() -> None:
    code = "from pilotfish.cli import main; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: ") and done.stderr.count("\n") == 1
