"""What notebooks show of a run, a tensor and an alert: a sentence, facts and charts, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from watchstep.plots.html_chart import chart_css, html_text

NOTEBOOK_POINTS = 400
"""Points of a line; a cell of a notebook is about 800 pixels wide."""

_STYLE = """
.watchstep { max-width: 60rem; }
.watchstep p { margin: 0 0 0.5rem; font-weight: 600; overflow-wrap: anywhere; }
.watchstep table { margin: 0 0 0.75rem; border-collapse: collapse; }
.watchstep th, .watchstep td { text-align: left; padding: 0.1rem 1rem 0.1rem 0; overflow-wrap: anywhere; vertical-align: top; }
.watchstep th { opacity: 0.75; font-weight: normal; }
"""


class NotebookChart(Protocol):
    """A chart that needs no script."""

    def as_html(self) -> str:
        """Return the chart."""
        ...


def notebook_html(
    sentence: str,
    facts: Sequence[tuple[str, str]],
    charts: Sequence[NotebookChart] = (),
    lists: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """Return the HTML of an object.

    Args:
        sentence: what it is, or what happened.
        facts: names and values; those without a value are omitted.
        charts: its charts.
        lists: headings with lines of text; empty lists are omitted.
    """
    rows = "".join(
        f"<tr><th>{html_text(name)}</th><td>{html_text(value)}</td></tr>" for name, value in facts if value
    )
    more = "".join(
        f"<p>{html_text(heading)}</p><ul>{''.join(f'<li>{html_text(line)}</li>' for line in lines)}</ul>"
        for heading, lines in lists
        if lines
    )
    drawn = "".join(chart.as_html() for chart in charts)
    return (
        f'<div class="watchstep"><style>{chart_css()}{_STYLE}</style><p>{html_text(sentence)}</p>'
        f"<table>{rows}</table>{more}{drawn}</div>"
    )
