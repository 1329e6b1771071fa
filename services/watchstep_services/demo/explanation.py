"""The explanation: what fired, where, against what, how fast it stopped, and how to fetch the evidence again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from watchstep.errors import ServiceError
from watchstep_services.demo.outcome import TrainingOutcome
from watchstep_services.demo.picture import Evidence, draw_png, draw_text
from watchstep_services.demo.watching import WatchedRun

_PLOT_COLUMNS = 96


def explain(
    console: Console, runs: list[WatchedRun], outcomes: dict[str, TrainingOutcome], picture: Path
) -> None:
    """Print the explanation and draw the picture.

    Args:
        console: where to print.
        runs: the healthy and the faulty run, settled.
        outcomes: what became of them, by run id.
        picture: the PNG to write.

    Raises:
        ServiceError: the demo did not go as it should: no alert on the faulty run, or one on the healthy.
    """
    healthy, faulty = runs
    outcome = outcomes[faulty.run_id]
    if healthy.alerts or not faulty.alerts or healthy.run is None or faulty.run is None:
        raise ServiceError(
            f"demo: {len(healthy.alerts)} alerts on the healthy run, {len(faulty.alerts)} on the faulty one",
            "see the logs in its folder",
        )
    alert = min(faulty.alerts, key=lambda held: int(held["finding"]["time_ns"]))
    finding = alert["finding"]
    stopped_at = outcome.stopped_at_step if outcome.stopped_at_step is not None else faulty.last_step
    evidence = Evidence(
        healthy.run, faulty.run, finding["step"], stopped_at, f"{alert['rule']}: {finding['message']}"
    )
    console.print()
    console.print(Text.from_ansi(draw_text(evidence, _PLOT_COLUMNS, colours=console.is_terminal)))
    draw_png(evidence, picture)
    for name, text in _lines(alert, outcome, healthy, picture):
        console.print(Text.assemble((f"{name:9}", "bold"), f" {text}"), soft_wrap=True)
    console.print()
    console.print("The same evidence, any time after the run:")
    console.print()
    console.print(Text(evidence_lines(faulty.run.location, finding["tensor"])), soft_wrap=True)


def evidence_lines(run: str, tensor: str) -> str:
    """Three lines of Python that fetch the evidence."""
    return (
        "    import watchstep\n"
        f"    run = watchstep.open_run({run!r})\n"
        f"    print(run.tensor({tensor!r}).statistics().to_pandas().query('nan > 0')"
        "[['step', 'nan', 'count', 'min', 'max']])\n"
    )


def _lines(
    alert: dict[str, Any], outcome: TrainingOutcome, healthy: WatchedRun, picture: Path
) -> list[tuple[str, str]]:
    finding = alert["finding"]
    where = f"{finding['tensor']}, of module {finding['module']!r} ({finding['module_type']})"
    seconds = outcome.detect_to_stop_seconds
    took = "" if seconds is None else f", {seconds:.2f} s after the bad step"
    return [
        ("rule", f"{alert['rule']} ({alert['severity']})"),
        ("step", f"{finding['step']}"),
        ("layer", where if finding["module"] else finding["tensor"]),
        ("value", f"{finding['value']:g}, where {finding['threshold']:g} is tolerated: {finding['message']}"),
        ("why", _cause(finding)),
        ("stopped", f"after step {outcome.stopped_at_step}{took}"),
        ("healthy", f"the same program on clean data: {healthy.state}, no alert"),
        ("picture", str(picture)),
    ]


def _cause(finding: dict[str, Any]) -> str:
    """What the place of the first bad tensor says: a step reads weights, then computes forward, loss, backward."""
    if finding["upstream"]:
        return "the batch of this step was bad, and the update makes NaN of every weight that its gradient reaches"
    kind = {
        0: "the weights were bad before this step began: look at the update before it",
        1: "of the outputs that were measured or still in memory this is the first bad one, and the weights were"
        " still finite: look at this batch, this module, and those before it",
        2: "all outputs were still finite: look at the loss function and the labels",
        3: "the update makes NaN of every weight that this gradient reaches: look at the first bad tensor of its step",
    }
    return kind.get(finding["cause_rank"][0], "nothing before it in the step was bad")
