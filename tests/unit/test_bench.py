"""``pilotfish bench``: prompts, order of runs, figures, the file and its resumption, over engines without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fake_llm import Letters, make_llm
from pilotfish.bench import (
    OVERALL,
    Group,
    Measured,
    Question,
    Run,
    encode_prompts,
    load_questions,
    measure,
    plan_groups,
    run_batch,
    summarise,
    take,
)
from pilotfish.bench.summary import percentile
from pilotfish.cli import bench as bench_command
from pilotfish.cli.app import run
from pilotfish.cli.bench_options import BenchOptions
from pilotfish.config import Ngram, Speculation
from pilotfish.engine import Engine
from pilotfish.errors import ConfigError, RequestError
from pilotfish.speculation.ngram import NgramProposer
from pilotfish.types import SamplingParams

Output = pytest.CaptureFixture[str]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
QUESTIONS = [
    Question(i, category, ("abcabcabc" + "defghi"[i],)) for i, category in enumerate(["x", "x", "x", "y", "y", "z"])
]


def make_engines(schemes: Mapping[str, Speculation | None], **settings: Any) -> dict[str, Engine]:
    engines = {}
    for name, speculation in schemes.items():
        proposer = NgramProposer(4, 1) if speculation is not None else None
        engines[name] = make_llm(
            speculation=speculation, proposer=proposer, enable_prefix_caching=False, **settings
        ).engine
    return engines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [
        json.dumps({"question_id": q.question_id, "category": q.category, "turns": [*q.turns, "no"]}) for q in QUESTIONS
    ]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Engine]:
    """The engines that the command will load, none at first."""
    loaded: dict[str, Engine] = {}

    def load(
        options: BenchOptions, schemes: Mapping[str, Speculation | None], max_model_len: int
    ) -> Mapping[str, Engine]:
        loaded.update(make_engines(schemes))
        return loaded

    monkeypatch.setattr(bench_command, "load_engines", load)
    monkeypatch.setattr(bench_command, "read_target", lambda options: bench_command._Target(Letters(), 48))
    return loaded


def bench(data: Path, *flags: str) -> int:
    return run(["bench", "--data", str(data), "--max-tokens", "8", "--ignore-eos", "--min-ngram", "1", *flags])


def test_questions_are_split_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"question_id": "a", "category": "c", "turns": ["one\u2028two\x85three"]}, ensure_ascii=False)
    path.write_text(f"{line}\r\n\n{line}", encoding="utf-8", newline="")
    assert load_questions(path) == [Question("a", "c", ("one\u2028two\x85three",))] * 2


def test_the_packages_own_questions() -> None:
    questions = load_questions()
    categories = {question.category for question in questions}
    assert len({question.question_id for question in questions}) == len(questions) == 24
    assert {"code", "editing"} < categories
    assert len(categories) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "data.jsonl:2: is not JSON"),
        (b"\xff", "data.jsonl:2: is not JSON"),
        (b"[]", "data.jsonl:2: must be a JSON object"),
        (b'{"category": "c", "turns": ["t"]}', "data.jsonl:2: question_id=None"),
        (
            b'{"question_id": 1.5, "category": "c", "turns": ["t"]}',
            "data.jsonl:2: question_id=1.5: must be a string or an integer",
        ),
        (b'{"question_id": true, "category": "c", "turns": ["t"]}', "data.jsonl:2: question_id=True"),
        (
            b'{"question_id": 1, "category": "c", "turns": ["t", "a\\ud800"]}',
            "data.jsonl:2: turns is not valid Unicode",
        ),
        (b'{"question_id": 1, "category": "\\udfff", "turns": ["t"]}', "data.jsonl:2: category is not valid Unicode"),
        (b'{"question_id": "\\ud800", "category": "c", "turns": ["t"]}', "data.jsonl:2: question_id is not valid"),
        (b'{"question_id": 1, "turns": ["t"]}', "data.jsonl:2: category=None"),
        (b'{"question_id": 1, "category": "c", "turns": []}', "data.jsonl:2: turns"),
        (b'{"question_id": 1, "category": "c", "turns": [""]}', "data.jsonl:2: turns"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"question_id": 1, "category": "c", "turns": ["t"]}\n' + line)
    with pytest.raises(ConfigError, match=message):
        load_questions(path)


def test_no_questions_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="has no questions"):
        load_questions(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_questions(tmp_path / "missing")


def test_a_limit_takes_from_all_categories() -> None:
    assert [q.question_id for q in take(QUESTIONS, 4)] == [0, 1, 3, 5]
    assert take(QUESTIONS, None) == take(QUESTIONS, 99) == QUESTIONS


def test_prompts_go_through_the_template_and_long_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = Letters()
    questions = [Question(1, "c", ("ab", "cd")), Question(2, "c", ("abcdef",))]
    prompts, too_long = encode_prompts(questions, tokenizer, max_prompt_len=4)
    assert [prompt.token_ids for prompt in prompts] == [tokenizer.encode("uaba")]
    assert too_long == questions[1:]
    monkeypatch.setattr(Letters, "has_chat_template", False)
    prompts, _ = encode_prompts(questions, tokenizer, max_prompt_len=6)
    assert [prompt.token_ids for prompt in prompts] == [tokenizer.encode("ab"), tokenizer.encode("abcdef")]


def test_batches_are_of_one_category_and_full() -> None:
    prompts, _ = encode_prompts(QUESTIONS, Letters(), 48)  # type: ignore[arg-type]
    groups = plan_groups(prompts, [1, 2])
    assert len({group.key for group in groups}) == len(groups)
    listed = {group.key: [prompt.question.question_id for prompt in group.prompts] for group in groups}
    assert listed == {
        (1, "x", 0): [0], (1, "x", 1): [1], (1, "x", 2): [2], (1, "y", 0): [3], (1, "y", 1): [4], (1, "z", 0): [5],
        (2, "x", 0): [0, 1], (2, "x", 1): [2, 0], (2, "y", 0): [3, 4], (2, "z", 0): [5, 5],
    }  # fmt: skip
    assert {group.batch for group in groups[:6]} == {1, 2}, "a run that is cut short has some of each size"


def test_schemes_take_turns_and_outputs_are_compared() -> None:
    engines = make_engines({"none": None, "ngram": Ngram(min_ngram=1)})
    order: list[str] = []
    for name, engine in engines.items():
        add = engine.add_request
        engine.add_request = lambda *args, n=name, a=add: (order.append(n), a(*args))[1]  # type: ignore[method-assign]
    prompts, _ = encode_prompts(QUESTIONS, Letters(), 48)  # type: ignore[arg-type]
    planned = plan_groups(prompts, [2])
    groups = list(measure(engines, planned, GREEDY))
    assert order == ["none", "none", "ngram", "ngram", "ngram", "ngram", "none", "none"] * 2
    assert [group.key for group in groups] == [group.key for group in planned]
    for group in groups:
        assert [single.scheme for single in group.runs] == ["none", "ngram"]
        for single in group.runs:
            assert [request.identical for request in single.requests] == [True, True]
            assert [request.num_tokens for request in single.requests] == [8, 8]
            assert all(len(request.arrivals_ms) == request.num_steps - 1 for request in single.requests)
    assert any(request.num_drafted for group in groups for request in group.runs[1].requests)
    assert [group.key for group in measure(engines, planned, GREEDY, {planned[0].key})] == [g.key for g in planned[1:]]


def test_other_outputs_are_noticed() -> None:
    engines = {**make_engines({"none": None}), **make_engines({"ngram": Ngram()}, eos_bias=40.0)}
    prompts, _ = encode_prompts(QUESTIONS[:1], Letters(), 48)  # type: ignore[arg-type]
    (group,) = measure(engines, plan_groups(prompts, [1]), SamplingParams(temperature=0.0, max_tokens=8))
    assert [single.requests[0].identical for single in group.runs] == [True, False]
    overall = summarise([group])[:2]
    assert [(item.num_identical, item.num_requests) for item in overall] == [(1, 1), (0, 1)]


def test_a_request_that_cannot_be_served_leaves_the_engine_idle() -> None:
    (engine,) = make_engines({"none": None}).values()
    with pytest.raises(RequestError, match="max_model_len"):
        run_batch(engine, [[1, 2], [1] * 60], GREEDY)
    assert not engine.has_unfinished
    assert engine.pool.num_free == 64


def measured(
    tokens: int, steps: int, *, drafted: int = 0, accepted: int = 0, identical: bool | None = True
) -> Measured:
    return Measured(
        question_id=1, num_prompt_tokens=4, num_tokens=tokens, num_steps=steps, ttft_ms=10.0 * steps,
        arrivals_ms=[float(i) for i in range(1, steps)], num_draft_steps=min(drafted, 1),
        num_draft_tokens=accepted + min(drafted, 1), num_drafted=drafted, num_accepted=accepted,
        drafted_at=[1] * drafted, accepted_at=[1] * accepted + [0] * (drafted - accepted), identical=identical,
    )  # fmt: skip


def test_figures() -> None:
    groups = [
        Group(1, "x", 0, [
            Run("none", 2.0, [measured(10, 10)]), Run("ngram", 1.0, [measured(10, 8, drafted=4, accepted=2)])
        ]),
        Group(1, "y", 0, [
            Run("none", 1.0, [measured(5, 5)]), Run("ngram", 2.0, [measured(5, 5, drafted=2, identical=False)])
        ]),
    ]  # fmt: skip
    figures = {(item.category, item.scheme): item for item in summarise(groups)}
    assert list(figures) == [(c, s) for c in (OVERALL, "x", "y") for s in ("none", "ngram")]
    assert figures["x", "ngram"].tokens_per_second == 10.0
    assert figures["x", "ngram"].ratio == 2.0
    assert figures["y", "ngram"].ratio == 0.5
    assert figures["y", "none"].ratio == 1.0
    overall = figures[OVERALL, "ngram"]
    assert (overall.tokens_per_second, overall.ratio) == (5.0, 1.0)
    assert overall.tokens_per_step == 15 / 13
    assert overall.mean_accepted_length == 4 / 2  # (2 drafts + bonus, then a bonus alone) over two steps
    assert overall.acceptance == 2 / 6
    assert overall.acceptance_by_position == [0.5, 0.5, 0.0, 0.0]
    assert (overall.num_identical, overall.num_requests) == (1, 2)
    assert figures[OVERALL, "none"].mean_accepted_length is None
    assert (overall.ttft_ms_p50, overall.itl_ms_p50, overall.itl_ms_p99) == (50.0, 3.0, 7.0)
    (alone,) = [item for item in summarise([Group(1, "x", 0, groups[0].runs[1:])]) if item.category == "x"]
    assert alone.ratio is None


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_the_command_prints_a_table_and_writes_everything(
    data: Path, engines: dict[str, Engine], capsys: Output, tmp_path: Path
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    flags = ["--scheme", "none,ngram", "--batch", "1,2", "--num-drafts", "3", "--json", str(out), "--plot", str(plot)]
    assert bench(data, *flags) == 0
    captured = capsys.readouterr()
    for word in ("tokens/s", "ratio", "mean length", "TTFT ms", "ITL p99", "identical", "overall", "ngram", "6/6"):
        assert word in captured.out
    content = json.loads(out.read_text())
    assert content["complete"] is True
    assert content["settings"]["batches"] == [1, 2]
    assert content["settings"]["schemes"]["none"] is None
    assert content["settings"]["schemes"]["ngram"]["num_drafts"] == 3
    assert {"cpu", "cpus", "torch", "python"} == set(content["machine"])
    assert len(content["groups"]) == 10
    overall = next(item for item in content["summary"] if item["scheme"] == "ngram")
    assert overall["category"] == "overall"
    assert overall["num_identical"] == overall["num_requests"] == 6
    assert overall["mean_accepted_length"] >= 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not any(engine.has_unfinished for engine in engines.values())


def test_ctrl_c_reports_what_is_there_and_resume_goes_on(
    data: Path, engines: dict[str, Engine], capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    calls = iter(range(100))
    serve = run_batch

    def interrupted(*args: Any) -> Any:
        if next(calls) == 5:  # in the third group, after one of its two schemes
            raise KeyboardInterrupt
        return serve(*args)

    monkeypatch.setattr("pilotfish.bench.run.run_batch", interrupted)
    monkeypatch.setattr("pilotfish.bench.warm_up", lambda *args: None)
    assert bench(data, "--json", str(out)) == 130
    captured = capsys.readouterr()
    assert "stopped" in captured.err
    assert "overall" in captured.out
    content = json.loads(out.read_text())
    assert (content["complete"], len(content["groups"])) == (False, 2)

    monkeypatch.setattr("pilotfish.bench.run.run_batch", serve)
    assert bench(data, "--json", str(out), "--resume") == 0
    resumed = json.loads(out.read_text())
    assert resumed["complete"] is True
    assert resumed["groups"][:2] == content["groups"]
    assert len(resumed["groups"]) == 6
    capsys.readouterr()
    assert bench(data, "--json", str(out), "--resume", "--num-drafts", "2") == 2
    assert "was measured with schemes=" in capsys.readouterr().err


def test_lossy_verification_is_named_wherever_figures_are(
    engines: dict[str, Engine], data: Path, tmp_path: Path, capsys: Output
) -> None:
    out = tmp_path / "out.json"
    lossy = ("--scheme", "none,ngram", "--verify", "threshold", "--threshold", "0.01")
    assert bench(data, *lossy, "--json", str(out)) == 0
    assert "ngram (LOSSY)" in capsys.readouterr().out
    content = json.loads(out.read_text())
    exact = {summary["scheme"]: summary["exact"] for summary in content["summary"]}
    assert exact == {"none": True, "ngram": False}
    assert all(
        request["exact"] == (run["scheme"] == "none")
        for group in content["groups"]
        for run in group["runs"]
        for request in run["requests"]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheme", "none,medusa"], "scheme='medusa'"),
        (["--scheme", "none,none"], "lists none twice"),
        (["--scheme", "ngram,draft"], "needs --draft"),
        (["--scheme", "none", "--max-ngram", "3"], "max_ngram=3: has no use with --scheme none"),
        (["--batch", "0"], "batch='0'"),
        (["--batch", "1,1"], "batch='1,1'"),
        (["--batch", "one"], "batch='one'"),
        (["--limit", "0"], "limit=0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--max-tokens", "47"], "leaves room for no prompt"),
        (["--resume"], "needs --json"),
        (["--json", "/no/such/folder/out.json"], "there is no folder"),
        (["--plot", "figure.xyz"], "must end in one of"),
        (["--data", "/no/such/file"], "cannot be read"),
        (["--temperature", "-1"], "temperature=-1"),
    ],
)
def test_bad_settings_are_one_line_before_anything_is_loaded(
    data: Path, engines: dict[str, Engine], capsys: Output, flags: list[str], message: str
) -> None:
    assert bench(data, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert engines == {}


def test_a_file_that_is_not_ours_is_not_resumed(
    data: Path, engines: dict[str, Engine], capsys: Output, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    out.write_text('{"settings": {}, "groups": []}')
    assert bench(data, "--json", str(out), "--resume") == 2
    assert "is not a file of pilotfish bench" in capsys.readouterr().err


def test_without_matplotlib_the_error_says_how_to_get_it(
    data: Path, engines: dict[str, Engine], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backend_bases", None)
    assert bench(data, "--plot", "figure.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert engines == {}


def test_engines_have_rows_for_the_largest_batch_and_no_prefix_cache() -> None:
    config = BenchOptions(batch="1,1000").engine_config(Ngram(num_drafts=4), max_model_len=100)
    assert config.max_num_seqs == 1000
    assert config.max_num_batched_tokens == 1000
    assert config.enable_prefix_caching is False
