"""Nothing lost: ``python -m benchmarks.crash [--kills 1000] [--quick] [--json FILE] [--seed N]
[--lease SECONDS] [--pace SECONDS]``.

Production's processes, PostgreSQL and Redis are killed at named points and at random while simulated trainings are
judged and stopped; connections are cut, answers to COMMIT swallowed, clocks moved, processes paused past their lease.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.crash import clock
from benchmarks.crash.campaign import Outcome, Wanted, running
from benchmarks.report import Figure, Report, arguments
from watchstep_services.core.failpoints import POINTS

ZERO = (
    "stop events lost",
    "stop events doubled",
    "attempts without exactly one effective stop",
    "jobs of bad attempts that nobody stopped",
    "healthy attempts stopped",
    "alerts that differ from a calm evaluation",
    "events of alerts lost or doubled",
    "notifications lost",
    "outbox actions left pending",
    "leases left stuck",
    "states stuck",
    "runs that nobody knows",
)
_SHOWN = 5


def main() -> int:
    """Run it; 1 where anything was lost, doubled or stuck."""
    parser = arguments("Kills everything at named points, and counts what was lost.")
    parser.add_argument("--kills", type=int, default=1000, help="go on until so many processes were killed")
    parser.add_argument("--seconds", type=float, default=0.0, help="but no longer than this")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--lease", type=float, default=1.5, help="seconds; more on a busy machine")
    parser.add_argument(
        "--pace", type=float, default=0.3, help="seconds between blows; more on a busy machine"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="copy logs of a campaign that failed here")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seconds = parsed.seconds or (30.0 if parsed.quick else 3600.0)
    wanted = Wanted(parsed.kills, seconds, pause=parsed.pace, lease=parsed.lease, seed=parsed.seed)
    # A short path that another user may enter: as root, PostgreSQL runs as one.
    with tempfile.TemporaryDirectory(prefix="ws-crash-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running(folder, wanted) as campaign:
            outcome = campaign.carry_out(wanted)
        if parsed.keep and (outcome.verdict.amiss or outcome.done.wrote):
            shutil.copytree(folder, parsed.keep, ignore=shutil.ignore_patterns("postgres", "store"))
    report = report_of(outcome, wanted, quick=parsed.quick)
    report.finish(parsed.json)
    return int(bool(outcome.verdict.amiss or outcome.done.wrote))


def report_of(outcome: Outcome, wanted: Wanted, *, quick: bool) -> Report:
    """Figures of a campaign."""
    report = Report("Nothing lost", quick, ("celery", "redis", "psycopg", "sqlalchemy"))
    done, verdict = outcome.done, outcome.verdict
    kills = sum(done.kills.values())
    target = None if quick else float(wanted.kills)
    report.add("kills", Figure(kills, "kills", target, "at least", note=f"in {outcome.seconds:.0f} s"))
    at_points = {name: count for name, count in done.kills.items() if name in POINTS}
    named = f"{len(at_points)} points, least {min(at_points.values(), default=0)}"
    report.add("kills at named points", Figure(sum(at_points.values()), "kills", note=named))
    for name, count in sorted(done.kills.items()):
        report.add(f"killed: {name}", Figure(count, "kills"))
    for name, count in sorted(done.others.items()):
        report.add(name, Figure(count, "times"))
    report.add("answers to COMMIT swallowed", Figure(outcome.commits_swallowed, "times"))
    report.add(
        "runs", Figure(outcome.runs, "runs", note=f"{verdict.attempts} attempts, {verdict.alerts} alerts")
    )
    report.add("stops asked for", Figure(verdict.stops, "stops"))
    for name in ZERO:
        report.add(name, Figure(len(verdict.amiss.get(name, [])), "", 0))
    report.add("rows written by a process paused past its lease", Figure(len(done.wrote), "rows", 0))
    report.add("of those that were paused, found themselves fenced", Figure(done.fenced, "processes"))
    report.add("receivers told", Figure(verdict.notified, "notifications"))
    report.add(
        "of those told again", Figure(verdict.repeated, "notifications", note="at least once is the promise")
    )
    report.add("calls to stop a job again", Figure(verdict.repeated_stops, "calls", note="without effect"))
    report.add(
        "announcements that nobody took",
        Figure(outcome.unheard, "", note=f"of {outcome.announced + outcome.unheard}"),
    )
    _latencies(report, verdict.latencies_ns)
    how = (
        "libfaketime"
        if clock.library()
        else "patched time.time and time.time_ns: libfaketime is not installed"
    )
    report.remark(
        f"Seed {wanted.seed}. Clocks of one of the two workers jump by {how}. Deaths seen: {outcome.deaths}."
    )
    for kind, texts in verdict.amiss.items():
        for text in texts[:_SHOWN]:
            report.remark(f"{kind}: {text}")
    for text, count in Counter(done.wrote).most_common(4 * _SHOWN):
        report.remark(f"{text} ({count})")
    return report


def _latencies(report: Report, found: list[int]) -> None:
    if len(found) < 2:
        return
    seconds = sorted(latency / 1e9 for latency in found)
    report.add("bad segment written to stop asked for, median", Figure(statistics.median(seconds), "s"))
    report.add("the same, longest", Figure(seconds[-1], "s", note="under fire"))


if __name__ == "__main__":
    sys.exit(main())
