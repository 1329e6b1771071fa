from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.sdk.boosting.models import KnownModel
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.reading.stored import LOSS, new_run, write
from tests.sdk.training import EVERY_STEP
from watchstep import Hook, Run, open_run
from watchstep.boosting.evaluations import MetricValue
from watchstep.boosting.model import Task
from watchstep.boosting.recorder import BoostingOptions, HookRecording
from watchstep.client import Client
from watchstep.client.documents import Alert, Event, RuleStatus, RunState
from watchstep.errors import ConfigError, NotFoundError, ServiceError
from watchstep.format import documents
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import CONTROL_DOCUMENT, ENDS, attempt_document
from watchstep.reading.boosting import read_boosting
from watchstep.report import collect_report, render_report, write_report
from watchstep.wrapper import report_command

HOSTILE = '</script><img src=x onerror="alert(1)">&amp;\u202e'
FIRST, BAD = gradient("first", order=1), gradient(HOSTILE, order=2)
OUTPUT = tensor("first:output", "activations", order=1)
STEPS, FIRED, LAST = 60, 40, 45
REASON = f"rule nan_or_inf: bad from step {FIRED}: 16 NaN among 16 elements of {HOSTILE}"


def rows() -> list[Row]:
    generator = np.random.default_rng(0)
    found = []
    for step in range(LAST + 1):
        values = generator.normal(0, 1, 16).tolist()
        bad = [np.nan] * 16 if step >= FIRED else values
        found += [
            Row(step, LOSS, [1 / (1 + step)]),
            Row(step, FIRST, values),
            Row(step, BAD, bad),
            Row(step, OUTPUT, values),
        ]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that a rule stopped, with hostile names."""
    folder = tmp_path_factory.mktemp("store")
    store = new_run(folder)
    write(store, [block_of(rows())])
    store.put(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    health = {
        "counts": {"dropped_rows": 3, "dropped_steps": 4},
        "overhead": {"share": 0.004},
        "notes": {"n": HOSTILE},
    }
    end = documents.EndDocument(0, "stopped", LAST, 9_000_000_000, 1, "w0", REASON, health)
    store.put(f"{ENDS}a/0.json", documents.encode(end))
    store.put(CONTROL_DOCUMENT, ControlDocument().with_stop(StopRequest("a", LAST, REASON)).encode())
    return open_run(folder / "default" / "r")


class Page(HTMLParser):
    """Tags with their attributes, and the texts of elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.contents: list[tuple[str, str]] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.contents.append((self._open, data))

    @property
    def text(self) -> str:
        return " ".join(data for tag, data in self.contents if tag not in {"script", "style"})

    def all(self, tag: str) -> list[str]:
        return [data for name, data in self.contents if name == tag]


class Service:
    """What a service says about the run."""

    def __init__(self, *, is_up: bool = True) -> None:
        self._is_up = is_up

    def run(self, _run: str) -> RunState:
        if not self._is_up:
            raise ServiceError("the service does not answer", "start it")
        rules = tuple(
            RuleStatus(name, name, "service", False, health, "", (), "inactive", {}, {})
            for name, health in (
                ("nan_or_inf", "ok"),
                ("dead_relu", "no_data"),
                ("overfit", "ok"),
                (HOSTILE, "error"),
            )
        )
        return RunState(cast("Any", None), {}, None, rules, {})

    def events(self, _run: str) -> Iterator[Event]:
        for kind, step in (("firing", 10), ("resolved", 20), ("firing", FIRED)):
            data = {
                "attempt": "a",
                "step": step,
                "since_step": step - 2,
                "rule_config": {"name": "nan_or_inf"},
            }
            yield Event("e", f"io.watchstep.alert.{kind}", "default/r", "", data, {})

    def alerts(self, _run: str) -> Iterator[Alert]:
        finding = {
            "step": FIRED,
            "tensor": BAD.name,
            "mode": "train",
            "worker": 0,
            "value": 16.0,
            "threshold": 0.0,
        }
        explanation = {"where": f"{HOSTILE} of layer", "usual_causes": [HOSTILE], "what_to_try": ["less"]}
        details = {"message": f"16 NaN in {HOSTILE}", "explanation": explanation}
        for attempt in ("a", "an earlier attempt"):
            yield Alert(
                "r",
                "nan_or_inf",
                "nan_or_inf",
                attempt,
                "critical",
                "firing",
                38,
                0,
                0,
                None,
                finding,
                details,
                {},
            )


def test_the_report_says_what_happened(run: Run) -> None:
    page = Page(render_report(collect_report(run)))
    assert (
        f"Run r was stopped by rule nan_or_inf: bad from step {FIRED}, ended after step {LAST}, " in page.text
    )
    assert "nan_or_inf: bad from step 40; firing" in page.text
    assert "No service was asked for alerts" in page.text
    for heading in ("Alerts", "Losses", "Layers", "Tensors that deviate most", "Configuration", "Health"):
        assert heading in page.all("h2")
    assert page.all("option")[0] == "l2 of gradients"
    cells = page.all("td")
    assert cells[:5] == ["0", "stopped", str(LAST), "0.40%", "7"]


def test_tensors_are_ranked_by_deviation(run: Run) -> None:
    report = collect_report(run)
    (bad,) = report.tensors
    assert (bad.name, bad.series.lines[0].name) == (BAD.name, "nonfinite_share")
    assert bad.series.usual is not None


def test_the_alerts_of_a_service_have_lanes_and_evidence(run: Run) -> None:
    report = collect_report(run, cast("Client", Service()))
    assert [(alert.step, alert.severity) for alert in report.alerts] == [(FIRED, "critical")]
    nan, broken = report.lanes
    assert (nan.name, list(nan.parts)) == (
        "nan_or_inf",
        [
            ("pending", 8, 9), ("fired", 10, 19), ("resolved", 20, 20), ("pending", 38, 39), ("fired", FIRED, LAST),
        ],
    )  # fmt: skip
    assert (broken.name, broken.note) == (HOSTILE, "error")
    assert report.quiet_rules == ["dead_relu (no data)", "overfit"]
    (tensor, *_) = report.tensors
    assert (tensor.name, tensor.series.lines[0].name, list(tensor.series.limits)) == (
        BAD.name, "nan", [("threshold", 0.0)],
    )  # fmt: skip
    text = Page(render_report(report)).text
    assert "Usual causes" in text
    assert "2 rules without an alert" in text


def test_a_service_that_does_not_answer_is_noted(run: Run) -> None:
    report = collect_report(run, cast("Client", Service(is_up=False)))
    assert [alert.name for alert in report.alerts] == ["nan_or_inf"]
    assert "the service does not answer" in report.notes[0]


def test_the_file_needs_nothing_else_and_its_policy_permits_nothing_else(run: Run) -> None:
    html = render_report(collect_report(run, cast("Client", Service())))
    page = Page(html)
    for tag, names in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "a"}
        assert not any(name.startswith("on") or name == "style" for name in names)
        for name in ("src", "href", "srcset", "action"):
            assert (names.get(name) or "data:").startswith("data:")
    (policy,) = (names["content"] for tag, names in page.tags if names.get("http-equiv"))
    assert policy is not None
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in policy
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert directives[directive] == f"'sha256-{digest}'"
    assert "http" not in re.sub(r"http-equiv", "", html)
    assert "prefers-color-scheme: dark" in html


def test_names_are_text(run: Run) -> None:
    html = render_report(collect_report(run, cast("Client", Service())))
    page = Page(html)
    assert [names for tag, names in page.tags if tag == "img" and names.get("src") == "x"] == []
    assert html.count("<script") == 2
    assert HOSTILE[:-1] in page.text
    assert "\u202e" not in page.text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    charts = json.loads(data)
    assert {chart["kind"] for chart in charts} == {"lines", "heat"}
    assert any(BAD.name in chart.get("names", ()) for chart in charts)
    numbers = [int(number) for number in re.findall(r'data-chart="(\d+)"', html)]
    assert numbers == list(range(len(charts)))


def test_a_run_without_records_has_a_report(tmp_path: Path) -> None:
    new_run(tmp_path)
    report = collect_report(open_run(tmp_path / "default" / "r"))
    text = Page(render_report(report)).text
    assert "Run r has no records yet; it has no step." in text
    assert "Nothing was recorded." in text


def test_the_command_writes_a_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WATCHSTEP_SERVICE", raising=False)
    for arguments, name in (([], "r.html"), (["-o", "mine.html", "--no-service"], "mine.html")):
        with pytest.raises(SystemExit) as exit_:
            report_command.main([run.location, *arguments])
        assert (exit_.value.code, capsys.readouterr().out) == (0, f"{name}\n")
        assert Path(name).read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(NotFoundError, match="not found"):
        report_command.main([f"{run.location}-2", "--no-service"])
    with pytest.raises(ConfigError, match="folder that exists"):
        report_command.main([run.location, "--no-service", "-o", "none/report.html"])


def test_a_report_needs_neither_matplotlib_nor_the_rules(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith(("matplotlib", "watchstep_rules"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    report = collect_report(run)
    assert not report.tensors
    assert any("pip install 'watchstep[rules]'" in note for note in report.notes)
    assert "Losses" in render_report(report)


def test_the_file_is_written_where_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    path = write_report(collect_report(run), tmp_path / "report.html")
    assert path.stat().st_size < 200_000


# Boosted trees


def boosted(folder: Path, task: Task) -> Run:
    hook = Hook(folder, config=EVERY_STEP)
    random = np.random.default_rng(0)
    features = random.random((100, 3))
    labels = features[:, 0] > 0.6 if task == "binary" else features[:, 0] + random.normal(size=100)
    options = BoostingOptions(training="train", train_data=(features, labels), shap_rows=10)
    recording = HookRecording(hook, "known", options)
    model = KnownModel(task, names=("age", HOSTILE, "third"), values=(4.0, 0.5, 1.0))
    for step in range(5):
        found = [
            MetricValue("train", "auc", 0.5 + step / 10, False),
            MetricValue("train", "rmse", 1 / (1 + step), True),
        ]
        recording.finish_round(lambda found=found: found, lambda: model, is_last=True)  # type: ignore[misc]
    hook.close()
    return open_run(hook.run_url)


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return boosted(tmp_path_factory.mktemp("classified"), "binary")


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return boosted(tmp_path_factory.mktemp("regression"), "regression")


def test_importance_is_by_name_and_ordered(classified: Run) -> None:
    boosting = read_boosting(classified.index, 100)
    assert boosting is not None
    gain = next(entry for entry in boosting.importances if entry.kind == "gain")
    assert (gain.step, list(gain.values)) == (4, [("age", 4), ("third", 1), (HOSTILE, 0.5)])
    assert [line.name for line in gain.lines] == ["age", "third", HOSTILE]
    assert [entry.kind for entry in boosting.importances] == ["gain", "shap", "weight"]


def test_the_report_of_a_classifier(classified: Run) -> None:
    page = Page(render_report(collect_report(classified)))
    assert "Boosting" in page.all("h2")
    headings = page.all("h3")
    for heading in (
        "Evaluations",
        "Importance at step 4: mean gain of a split",
        "Importance at step 4: mean magnitude of SHAP values",
        "Depth of a round's trees",
        "Confusion of classes",
        "Hyperparameters",
    ):
        assert heading in headings
    assert "Residuals: label minus prediction" not in headings
    cells = page.all("td")
    (first,) = (place for place, cell in enumerate(cells) if cell == "train" and cells[place + 1] == "0")
    counts = [entry for entry in read_boosting(classified.index, 100).classes if entry.label == "0"]  # type: ignore[union-attr]
    assert cells[first + 2] == str(counts[0].examples)
    assert cells[first + 4].startswith("1 (")  # examples between 0.5 and 0.6
    assert "learning_rate/0" in cells


def test_the_report_of_a_regression_has_residuals(regression: Run) -> None:
    page = Page(render_report(collect_report(regression)))
    assert {"Residuals: label minus prediction", "Residuals by power of two"} <= set(page.all("h3"))
    assert "Confusion of classes" not in page.all("h3")


def test_names_of_features_are_text(classified: Run) -> None:
    html = render_report(collect_report(classified))
    page = Page(html)
    assert [names for tag, names in page.tags if tag == "img" and names.get("src") == "x"] == []
    assert html.count("<script") == 2
    assert not any("style" in names for _, names in page.tags)
    notebook = Page(classified._repr_html_())
    assert [names for tag, names in notebook.tags if tag == "img" and names.get("src") == "x"] == []


def test_a_notebook_shows_the_same(classified: Run, regression: Run) -> None:
    headings = Page(classified._repr_html_()).all("h3")
    assert {"loss", "Evaluations", "Depth of a round's trees", "Confusion of classes"} <= set(headings)
    assert "Residuals: label minus prediction" in Page(regression._repr_html_()).all("h3")


def test_other_runs_have_no_such_section(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook:
        hook.log(loss=1.0)
        hook.step()
    run = open_run(hook.run_url)
    assert read_boosting(run.index, 100) is None
    assert "Boosting" not in Page(render_report(collect_report(run))).all("h2")
