"""Dashboard, alert rules and scrape configuration ask only for figures that there are, in PromQL that can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from tests.infra.compose import ROOT, services
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.metrics import FIGURES

INFRA = ROOT / "infra"
DASHBOARD = json.loads((INFRA / "grafana" / "watchstep.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((INFRA / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
SCRAPE = yaml.safe_load((INFRA / "prometheus" / "scrape.yaml").read_text(encoding="utf-8"))
CHART = (INFRA / "helm" / "watchstep" / "templates" / "autoscaling.yaml").read_text(encoding="utf-8")
_METRIC = re.compile(r"\b(watchstep_\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on)\s*\(([^)]*)\)")


def series() -> dict[str, frozenset[str]]:
    """Every series that /metrics may show, with its labels."""
    found = {name: frozenset(labels) for name, (labels, _) in FIGURES.items()}
    for name, kind, labels, _ in metrics.described():
        if kind in {"histogram", "summary"}:
            found |= {f"{name}_sum": frozenset(labels), f"{name}_count": frozenset(labels)}
        if kind == "histogram":
            found[f"{name}_bucket"] = frozenset({*labels, "le"})
        if kind in {"counter", "gauge"}:
            found[name] = frozenset(labels)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """(location, PromQL), with Grafana's variables at some value."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    (query,) = re.findall(r"query: (.+)", CHART)
    yield "autoscaling", query


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_queries_are_promql_over_series_that_there_are(place: str, query: str) -> None:
    promql_parser.parse(query)
    named = _METRIC.findall(query)
    assert named, place
    labels: set[str] = {"le"}
    for name, matchers in named:
        assert name in series(), f"{place}: {name}"
        label_names = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert label_names <= series()[name], f"{place}: {name} has no label {label_names - series()[name]}"
        labels |= series()[name]
    for grouping in _GROUPING.findall(query):
        assert {label.strip() for label in grouping.split(",") if label.strip()} <= labels, place


def test_every_figure_is_on_the_dashboard_or_in_an_alert() -> None:
    queried = {name for _, query in queries() for name, _ in _METRIC.findall(query)}
    shown = {re.sub(r"_(sum|count|bucket)$", "", name) for name in queried}
    metric_names = {name for name, *_ in metrics.described()} | set(FIGURES)
    assert metric_names - queried - shown == set()


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource"]
    # No panel lies upon another.
    taken = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))


def test_alerts_state_what_to_do() -> None:
    names = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]
    assert len(names) == len(set(names))
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["alert"].startswith("Watchstep")
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "description"}


def test_what_is_scraped_is_what_compose_starts() -> None:
    (inside, _outside) = SCRAPE["scrape_configs"]
    (found,) = inside["dns_sd_configs"]
    for name in found["names"]:
        environment = services()[name]["environment"]
        assert environment["WATCHSTEP_METRICS_PORT"] == str(found["port"])
        assert environment["WATCHSTEP_METRICS_HOST"] == "0.0.0.0"
        assert not any("9464" in port for port in services()[name].get("ports", []))
    assert all((INFRA / "prometheus" / name).exists() for name in SCRAPE["rule_files"])
