"""``pilotfish bench-serve`` against a running server, over the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotfish.cli.app import run
from servers import running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [
        {"turns": [word]} if number % 2 else {"text": word} for number, word in enumerate(["hello", "pilot", "fish"])
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("flags", [("--concurrency", "1,4"), ("--rate", "1000", "--concurrency", "2")])
def test_a_server_under_load(tmp_path: Path, data: Path, flags: tuple[str, ...]) -> None:
    out = tmp_path / "out.json"
    with running(api_key="sesame") as server:
        common = ["bench-serve", "--url", server.url, "--data", str(data), "--max-tokens", "20", "--ignore-eos"]
        assert run([*common, "--num-prompts", "12", "--api-key", "sesame", "--json", str(out), *flags]) == 0
        server.wait_idle()
    content = json.loads(out.read_text())
    assert content["settings"]["is_pilotfish"] is True and content["settings"]["model"] == "letters"
    assert len(content["levels"]) == flags[1].count(",") + 1
    for level, summary in zip(content["levels"], content["summary"], strict=True):
        assert summary["errors"] == {} and summary["num_requests"] == 12 and summary["num_tokens"] == 240
        assert summary["mean_accepted_length"] > 1 and 0 < summary["acceptance"] < 1
        for request in level["requests"]:
            assert request["finish_reason"] == "length"
            # Every token but those of the first chunk has its share of a wait.
            first = 20 - len(request["itl_ms"])
            assert 1 <= first <= 6
            assert request["ttft_ms"] <= request["e2e_ms"]


def test_plain_decoding_can_be_asked_for(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out.json"
    with running() as server:
        common = ["bench-serve", "--url", server.url, "--data", str(data), "--max-tokens", "8", "--ignore-eos"]
        assert run([*common, "--concurrency", "2", "--no-speculation", "--json", str(out)]) == 0
    [summary] = json.loads(out.read_text())["summary"]
    assert summary["num_requests"] == 8 and summary["acceptance"] is None
