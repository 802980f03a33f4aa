"""``benchmarks/server_overhead.py``: what it makes of the figures of both sides."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Any:
    # The benchmarks are programs whose folder is on the path when they run.
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")
    import server_overhead

    monkeypatch.setattr(server_overhead, "_SETTLE", 0.0)
    return server_overhead


def test_prompts_are_of_all_kinds_with_64_to_128_tokens(overhead: Any) -> None:
    tasks = overhead.make_tasks(48)
    assert len(tasks) == 48 and len({task.prompt for task in tasks}) == 24
    lengths = {task.max_tokens for task in tasks}
    assert min(lengths) == 64 and max(lengths) == 128 and len(lengths) > 4
    assert all(task.body["max_tokens"] == task.params.max_tokens for task in tasks)


def test_the_side_that_begins_changes_from_pair_to_pair(overhead: Any) -> None:
    order: list[str] = []

    def offline() -> str:
        order.append("offline")
        return "a"

    def online() -> str:
        order.append("online")
        return "b"

    assert [overhead.taken_in_turn(offline, online, number) for number in range(2)] == [("a", "b")] * 2
    assert order == ["offline", "online", "online", "offline"]


def test_latency_is_of_the_tokens_after_the_first(overhead: Any) -> None:
    assert overhead.milliseconds(overhead.Turn(["text"], num_tokens=11, seconds=0.5)) == pytest.approx(50)


@pytest.mark.parametrize(
    ("text", "served", "within", "passed", "different"),
    [
        ("same", "same", True, True, 0),
        ("same", "same", False, False, 0),
        ("one", "two", True, False, 1),
        ("cut \ufffd", "cut ", True, True, 0),  # the server leaves out a part of a character
    ],
)
def test_a_line_passes_if_the_bar_is_met_and_texts_are_equal(
    overhead: Any, text: str, served: str, within: bool, passed: bool, different: int
) -> None:
    pairs = [(overhead.Turn([text], 10, 1.0), overhead.Turn([served], 10, 2.0, client_s=1e-3, loop_s=2e-3))]
    row = overhead.result("name", [1.0, 2.0], 0.5, within, ">= 0.90", pairs)
    assert row["passed"] is passed and row["texts_that_differ"] == different
    assert row["loop_us_per_token"] == pytest.approx(200) and row["client_us_per_token"] == pytest.approx(100)
