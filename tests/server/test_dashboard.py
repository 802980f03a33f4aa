"""The Grafana dashboard: it asks for what ``/metrics`` has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from servers import with_client

PATH = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
METRIC = re.compile(r"pilotfish:\w+")


def queries(value: Any) -> Iterator[str]:
    """Every string of the dashboard that names a metric."""
    if isinstance(value, str):
        if METRIC.search(value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from queries(item)
    elif isinstance(value, list):
        for item in value:
            yield from queries(item)


def test_every_metric_of_the_dashboard_is_exposed() -> None:
    dashboard = json.loads(PATH.read_text(encoding="utf-8"))
    asked = {name for query in queries(dashboard) for name in METRIC.findall(query)}
    assert len(asked) >= 16
    labels = {name for query in queries(dashboard) for name in re.findall(r"by \((\w+)\)", query)} - {"le"}

    async def work(client: httpx.AsyncClient) -> None:
        body = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        text = (await client.get("/metrics")).text
        exposed = set(re.findall(r"^(pilotfish:\w+)[{ ]", text, flags=re.MULTILINE))
        assert asked <= exposed, asked - exposed
        assert labels and all(f'{label}="' in text for label in labels)

    with_client(work)


def test_it_can_be_imported() -> None:
    dashboard = json.loads(PATH.read_text(encoding="utf-8"))
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "model_name"]
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = target["expr"].count('{model_name=~"$model_name"}')
            assert selectors == len(METRIC.findall(target["expr"])), target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")
