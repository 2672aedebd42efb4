"""The Grafana dashboard and the Prometheus rules name only what /metrics has, with the labels that it has there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.drivers.web_server import web_server
from toka_async.messages import Stats

CONFIGS = Path(__file__).parents[4] / "configs"
NAME = re.compile(r"\b(?:toka:|process_|up\b)\w*")
SELECTED = re.compile(r"\b(toka:\w+|process_\w+|up)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GROUPED = re.compile(r"\bby \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job"}  # it adds these to every series
UP = {"up"}  # and this series

Series = dict[str, set[str]]


@pytest.fixture
async def series(tmp_path: Path) -> Series:
    """Every series of a server that has done something, with its labels."""
    async with web_server(data_dir=str(tmp_path)) as server:
        await server.ok("/v1/completions", {"prompt": "x", "max_tokens": 2})
        server.engine.memory["rank-0-0"] = (1, 2, 3)
        server.scheduler.silent = True  # these stay the newest
        server.engine.on_messages([Stats(scheduler_us=(1.0, 2.0, 3.0), stage_seconds=(1.0,))])
        async with server.http.get(server.url + "/metrics") as response:
            text = await response.text()
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / "grafana" / "toka-async.json").read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((CONFIGS / "prometheus" / "rules.yml").read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in rules())


def test_every_name_is_there_with_its_labels(series: Series) -> None:
    assert sum(1 for _ in expressions()) > 60
    for expression in expressions():
        names = set(NAME.findall(expression))
        assert names, expression
        assert names - UP <= series.keys(), expression
        for name, matchers in SELECTED.findall(expression):
            assert set(MATCHER.findall(matchers)) <= series.get(name, set()) | OF_PROMETHEUS, expression
        labels = set().union(*(series.get(name, set()) for name in names)) | OF_PROMETHEUS
        for grouped in GROUPED.findall(expression):
            assert {label.strip() for label in grouped.split(",")} <= labels, expression


async def test_a_gateway_finds_what_it_reads() -> None:
    """The names that the InferencePool's picker reads stand in its file."""
    read = set(re.findall(r"vllm:\w+", (CONFIGS / "deploy/kubernetes/inference-pool.yaml").read_text()))
    assert len(read) == 3
    async with web_server(vllm_metrics=True) as server, server.http.get(server.url + "/metrics") as response:
        assert read <= {each.name for each in text_string_to_metric_families(await response.text())}
    assert "server.vllm_metrics=true" in (CONFIGS / "deploy/kubernetes/deployment.yaml").read_text()


def test_a_wrong_name_would_be_found(series: Series) -> None:
    assert "toka:no_such_total" not in series
    assert NAME.findall("rate(toka:no_such_total[5m])") == ["toka:no_such_total"]
    assert MATCHER.findall('status=~"5..", path="/x"') == ["status", "path"]
    assert series["toka:http_requests_total"] == {"path", "status"}


def test_legends_have_labels_of_their_series() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = {each.strip() for group in GROUPED.findall(target["expr"]) for each in group.split(",")}
                assert label in kept | OF_PROMETHEUS, panel["title"]


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["title"] == board["uid"] == "toka-async"
    assert board["schemaVersion"] >= 36
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model_name": "query", "instance": "query"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board))) - {"__all", "__rate_interval"}
    assert used == variables.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert {"type", "title", "gridPos", "targets", "fieldConfig", "datasource", "options"} <= panel.keys()
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))


def test_no_panel_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_alerts_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["alert"].startswith("Toka")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
