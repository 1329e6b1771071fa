"""The page of a report: HTML that needs nothing else, with a strict Content-Security-Policy.

The policy permits one style sheet and one script, by their hashes, and images of ``data:`` addresses. So nothing can be loaded, and a name
that contains markup could not run even if it were not escaped. Without the script, the page shows the same charts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from watchstep.errors import ConfigError
from watchstep.format.documents import EndDocument
from watchstep.plots.html_chart import HeatChart, LineChart, chart_css, html_text, lanes_html
from watchstep.report.report_data import ExplainedTensor, ReportedAlert, RunReport

_MAX_JSON = 200_000
_MAX_WORKERS = 16
_NO_ALERT = {True: "No alert fired.", False: "The run was not stopped by an alert."}


def write_report(report: RunReport, path: str | os.PathLike[str]) -> Path:
    """Write a report as one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    try:
        target.write_text(render_report(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"report {target}: {error.strerror}", "use a file in a folder that exists and is writable"
        ) from error
    return target


def render_report(report: RunReport) -> str:
    """Return the page."""
    charts = _Charts()
    run = report.run
    title = html_text(f"{run.id}: {report.outcome.state}")
    sections = [
        _header(report),
        "<main>",
        _alerts(report),
        _section("Losses", charts.add(report.losses, "")),
        _boosting(report, charts),
        _heatmaps(report.heatmaps, charts),
        _tensors(report.tensors, charts),
        _section("Learning rates", charts.add(report.rates, "")) if report.rates.lines else "",
        _configuration(report),
        _health(report.ends),
        _footer(report),
        "</main>",
    ]
    style, script = chart_css() + _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{''.join(sections)}\n"
        f'<div id="tip" role="status" hidden></div>\n'
        f'<script type="application/json" id="data">{charts.data()}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


class _Charts:
    """The charts of the page, and their values for the script."""

    def __init__(self) -> None:
        self._data: list[dict[str, Any]] = []

    def add(self, chart: LineChart | HeatChart, note: str) -> str:
        """Return the chart's HTML with a note below it, and add its values to the page's data."""
        self._data.append(chart.data())
        text = f'<p class="soft">{html_text(note)}</p>' if note else ""
        return chart.as_html(len(self._data) - 1) + text

    def data(self) -> str:
        """Return the values as JSON that cannot end its element."""
        text = json.dumps(self._data, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html_text(title)}</h2>{body}</section>\n"


def _header(report: RunReport) -> str:
    run, outcome = report.run, report.outcome
    ended = max((end.ended_ns for end in report.ends), default=0)
    environment = run.environment()
    facts = [
        ("project", run.document.project),
        ("created", _time(run.document.created_ns)),
        ("ended", _time(ended) if ended else ""),
        ("created to ended", _duration(ended - run.document.created_ns) if ended else ""),
        ("steps", "none" if report.span is None else f"{report.span[0]} to {report.span[1]}"),
        ("workers", str(len(run.workers))),
        ("attempts", str(len(run.attempts))),
        ("command", environment.get("command", "")),
        ("host", environment.get("host", "")),
        ("location", run.location),
    ]
    return (
        f'<header><h1>{html_text(run.id)} <span class="state">{html_text(outcome.state)}</span></h1>'
        f'<p class="lead">{html_text(outcome.as_sentence(run.id))}</p>{_facts(facts)}</header>\n'
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>" for name, value in facts if value
    )
    return f'<dl class="facts">{rows}</dl>'


def _alerts(report: RunReport) -> str:
    body = "".join(map(_alert, report.alerts)) or f"<p>{_NO_ALERT[report.has_service]}</p>"
    if report.lanes and report.span is not None:
        body = lanes_html("", report.lanes, report.span) + body
    if report.quiet_rules:
        body += (
            f"<details><summary>{len(report.quiet_rules)} rules without an alert</summary>"
            f"<p>{html_text(', '.join(report.quiet_rules))}</p></details>"
        )
    if report.notes:
        body += (
            f'<ul class="notes soft">{"".join(f"<li>{html_text(note)}</li>" for note in report.notes)}</ul>'
        )
    return _section("Alerts", body)


def _alert(alert: ReportedAlert) -> str:
    severity = f" ({alert.severity})" if alert.severity else ""
    heading = f"{alert.name}{severity}: bad from step {alert.step}; {alert.phase}"
    where = f'<p class="soft">{html_text(alert.where)}</p>' if alert.where else ""
    lists = "".join(
        f"<details><summary>{name}</summary><ul>{''.join(f'<li>{html_text(line)}</li>' for line in lines)}</ul></details>"
        for name, lines in (("Usual causes", alert.causes), ("What to try", alert.remedies))
        if lines
    )
    return f'<article><h3 class="name">{html_text(heading)}</h3><p>{html_text(alert.message)}</p>{where}{lists}</article>'


def _boosting(report: RunReport, charts: _Charts) -> str:
    if report.boosting is None:
        return ""
    parts = []
    for chart in report.boosting.charts(report.losses.marks, report.span):
        if isinstance(chart, LineChart | HeatChart):
            parts.append(charts.add(chart, ""))
        else:
            parts.append(f'<div class="wide">{chart.as_html()}</div>')
    return _section("Boosting", "".join(parts))


def _heatmaps(heatmaps: Sequence[HeatChart], charts: _Charts) -> str:
    if not heatmaps:
        return ""
    options = "".join(f"<option>{html_text(chart.title)}</option>" for chart in heatmaps)
    choice = (
        f'<p hidden><label for="statistic">Statistic</label> <select id="statistic">{options}</select></p>'
        if len(heatmaps) > 1
        else ""
    )
    note = "The largest value of each cell, in the model's order. A cell without a measurement is empty."
    panels = "".join(f'<div class="heatmap">{charts.add(chart, "")}</div>' for chart in heatmaps)
    return _section("Layers", f'{choice}{panels}<p class="soft">{note}</p>')


def _tensors(tensors: Sequence[ExplainedTensor], charts: _Charts) -> str:
    if not tensors:
        return ""
    articles = []
    for tensor in tensors:
        body = charts.add(tensor.series, "")
        if tensor.histogram is not None:
            body += charts.add(tensor.histogram, "")
        articles.append(
            f'<article><h3 class="name">{html_text(tensor.name)}</h3><p>{html_text(tensor.why)}</p>{body}</article>'
        )
    return _section("Tensors that deviate most", "".join(articles))


def _configuration(report: RunReport) -> str:
    document = report.run.document
    blocks = [
        ("Environment", report.run.environment()),
        ("Capture configuration", document.config),
        ("Requested rules", list(document.rules)),
    ]
    body = "".join(
        f"<details><summary>{name}</summary>{_json(value)}</details>" for name, value in blocks if value
    )
    return _section("Configuration", body or "<p>No configuration was recorded.</p>")


def _json(value: Any) -> str:
    text = json.dumps(value, indent=1, ensure_ascii=False, default=str)
    shown = (
        text
        if len(text) <= _MAX_JSON
        else f"{text[:_MAX_JSON]}\n… ({len(text) - _MAX_JSON:,} more characters)"
    )
    lines = "\n".join(map(html_text, shown.split("\n")))
    return f"<pre>{lines}</pre>"


def _health(ends: Sequence[EndDocument]) -> str:
    if not ends:
        return _section("Health", "<p>No worker has ended, so no health was written.</p>")
    rows, details = [], []
    for end in sorted(ends, key=lambda end: end.worker)[:_MAX_WORKERS]:
        overhead = end.health.get("overhead")
        share = overhead.get("share") if isinstance(overhead, dict) else None
        dropped = _dropped(end)
        cells = (
            str(end.worker),
            end.state,
            str(end.last_step),
            f"{share:.2%}" if isinstance(share, int | float) else "-",
            str(dropped),
            end.reason,
        )
        rows.append(f"<tr>{''.join(f'<td>{html_text(cell)}</td>' for cell in cells)}</tr>")
        details.append(f"<details><summary>Worker {end.worker}</summary>{_json(end.health)}</details>")
    head = "".join(
        f"<th>{name}</th>" for name in ("worker", "state", "last step", "overhead", "dropped", "reason")
    )
    left = len(ends) - _MAX_WORKERS
    more = f'<p class="soft">and {left} more workers</p>' if left > 0 else ""
    table = (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    return _section("Health", table + more + "".join(details))


def _dropped(end: EndDocument) -> int:
    """Return how many rows, steps, objects and snapshots the recorder of a worker dropped."""
    counts = end.health.get("counts")
    if not isinstance(counts, dict):
        return 0
    return sum(
        count for name, count in counts.items() if str(name).startswith("dropped_") and type(count) is int
    )


def _footer(report: RunReport) -> str:
    now = _time(int(datetime.now(timezone.utc).timestamp() * 1e9))
    code = f"watchstep.open_run({report.run.location!r})"
    return f"<footer>Watchstep {html_text(version('watchstep'))}, {now}. The data: {html_text(code)}</footer>"


def _time(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _duration(nanoseconds: int) -> str:
    seconds = max(0, nanoseconds // 1_000_000_000)
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
