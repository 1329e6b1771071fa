"""What the service's processes count of themselves, for Prometheus.

Each process counts what it does. What stands in the database (queues, runs, alerts) is read there when Prometheus
asks: `database_figures`. Labels take few values, all known beforehand: never a run, a project or an address.

Metrics as Prometheus reads them: on a port of their own, or as a response of the API.

A process that forks (a Celery worker, an API with several processes) shares a folder with its children, in which each
keeps its metrics; the process that is scraped sums them. `figures_folder` names it, before prometheus_client is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

import watchstep
from watchstep.errors import ConfigError
from watchstep_services.core.process import FOLDER
from watchstep_services.core.settings import PREFIX, Settings

REGISTRY = CollectorRegistry(auto_describe=True)

_FAST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

BUILD_INFO = Gauge(
    "watchstep_build_info", "The version that runs; always 1.", ["version"], registry=REGISTRY,
    multiprocess_mode="max",
)  # fmt: skip
HTTP_SECONDS = Histogram(
    "watchstep_http_request_seconds",
    "How long requests took, by route (its pattern, or `none`) and class of status.",
    ["method", "route", "status"], buckets=_FAST, registry=REGISTRY,
)  # fmt: skip
LIMITS_REFUSED = Counter(
    "watchstep_rate_limits_refused",
    "Requests refused: too many to `ask`, to `record`, without a valid token (`fail`) or for the API's document (`open`), or too "
    "many bytes of answers `unread`.",
    ["of"], registry=REGISTRY,
)  # fmt: skip
CONNECTIONS_REFUSED = Counter(
    "watchstep_connections_refused",
    "Connections closed by the API: too many of one `address` or of all in a `process`, a `head` or `body` that did not come in time, a head that was too "
    "large or requests that waited for an earlier answer (`size`), or an answer that was not read (`write`).",
    ["of"], registry=REGISTRY,
)  # fmt: skip
LIMITS_OPEN = Counter(
    "watchstep_rate_limits_open",
    "Requests that went through uncounted, because the storage of the rate limits did not answer.",
    registry=REGISTRY,
)
ANNOUNCEMENTS = Counter(
    "watchstep_announcements",
    "Announced segments: `fresh`, `known` already, or `ignored` because too many wait.",
    ["result"],
    registry=REGISTRY,
)
RECORDER_ROWS = Counter(
    "watchstep_recorder_rows",
    "Rows that recorders report: `written`, `dropped`, or `spilled` to disk; spilled rows are usually written later.",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
RECORDER_OBJECTS = Counter(
    "watchstep_recorder_objects",
    "Objects that recorders report: `written`, `dropped`, `spilled` to disk, or `unwritten` at the end of the process.",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
RECORDER_BYTES = Counter(
    "watchstep_recorder_bytes", "Bytes of objects that recorders report as written.", registry=REGISTRY
)
RECORDER_SNAPSHOTS = Counter(
    "watchstep_recorder_snapshots", "Snapshots that recorders report: `written` or `dropped`.", ["outcome"],
    registry=REGISTRY,
)  # fmt: skip
RECORDER_DROPPED_STEPS = Counter(
    "watchstep_recorder_dropped_steps", "Steps that recorders report as dropped.", registry=REGISTRY
)
RECORDER_FAULTS = Counter("watchstep_recorder_faults", "Faults that recorders report.", registry=REGISTRY)
EVALUATIONS = Counter(
    "watchstep_evaluations",
    "Evaluations: `committed`; `idle`: nothing to judge; `busy`: another worker had the run; `fenced`: another took it "
    "meanwhile; `failed`.",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
EVALUATION_SECONDS = Histogram(
    "watchstep_evaluation_seconds",
    "How long evaluations that committed took.",
    buckets=_SLOW,
    registry=REGISTRY,
)
LAG_SECONDS = Histogram(
    "watchstep_evaluation_lag_seconds", "From a segment's announcement or discovery until it was judged.",
    buckets=_SLOW, registry=REGISTRY,
)  # fmt: skip
SEGMENTS = Counter(
    "watchstep_segments", "Segments that evaluations were through with: `read`, `corrupt`, or `missing`.",
    ["result"], registry=REGISTRY,
)  # fmt: skip
RULE_SECONDS = Summary(
    "watchstep_rule_seconds", "How long rules took for the rows of one evaluation, by rule.", ["rule"],
    registry=REGISTRY,
)  # fmt: skip
LEASES_LOST = Counter(
    "watchstep_leases_lost", "Work whose lease another worker took before it was recorded.", ["of"],
    registry=REGISTRY,
)  # fmt: skip
ACTION_TRIES = Counter(
    "watchstep_action_tries", "Tries of actions, by kind and what came of them.", ["kind", "outcome"],
    registry=REGISTRY,
)  # fmt: skip
DUPLICATES = Counter(
    "watchstep_notification_duplicates",
    "Notifications that were delivered after a try whose end nobody recorded: they may have come more than once.",
    ["kind"], registry=REGISTRY,
)  # fmt: skip
SWEEP_SECONDS = Histogram(
    "watchstep_sweep_seconds", "How long sweeps took that looked for work.", buckets=_SLOW, registry=REGISTRY
)
SWEEPS_FAILED = Counter("watchstep_sweeps_failed", "Sweeps that failed.", registry=REGISTRY)
SWEEP_FAULTS = Counter(
    "watchstep_sweep_faults",
    "What a sweep could not look at, and went on without: projects whose store cannot be listed (`project`), "
    "stores that do not answer (`store`), and, by a fault of "
    "the service itself, runs (`run`), journals (`journal`), groups of alerts (`group`), lists of what is due (`due`); the log "
    "says why.",
    ["of"], registry=REGISTRY,
)  # fmt: skip
HINTS_DROPPED = Counter(
    "watchstep_hints_dropped", "Hints of work that the broker did not take; the sweep does without.",
    registry=REGISTRY,
)  # fmt: skip
CONNECTIONS = Gauge(
    "watchstep_database_connections", "Open connections to the database: `in_use` or `idle`.", ["state"],
    registry=REGISTRY, multiprocess_mode="livesum",
)  # fmt: skip
CONNECTION_FAILURES = Counter(
    "watchstep_database_connection_failures", "Connections to the database that were lost or broken.",
    registry=REGISTRY,
)  # fmt: skip

# The counts of a recorder's health that are exported. A label for any other count would be a name that a recorder sends.
RECORDER_COUNTS: dict[str, Counter] = {
    "rows": RECORDER_ROWS.labels("written"),
    "dropped_rows": RECORDER_ROWS.labels("dropped"),
    "spilled_rows": RECORDER_ROWS.labels("spilled"),
    "objects": RECORDER_OBJECTS.labels("written"),
    "dropped_objects": RECORDER_OBJECTS.labels("dropped"),
    "spilled_objects": RECORDER_OBJECTS.labels("spilled"),
    "unwritten_objects": RECORDER_OBJECTS.labels("unwritten"),
    "bytes": RECORDER_BYTES,
    "snapshots": RECORDER_SNAPSHOTS.labels("written"),
    "dropped_snapshots": RECORDER_SNAPSHOTS.labels("dropped"),
    "dropped_steps": RECORDER_DROPPED_STEPS,
    "faults": RECORDER_FAULTS,
}

for _outcome in ("committed", "idle", "busy", "fenced", "failed"):
    EVALUATIONS.labels(_outcome)
for _result in ("fresh", "known", "ignored"):
    ANNOUNCEMENTS.labels(_result)
for _result in ("read", "corrupt", "missing"):
    SEGMENTS.labels(_result)
for _of in ("project", "store", "run", "journal", "group", "due"):
    SWEEP_FAULTS.labels(_of)
for _of in ("evaluation", "action"):
    LEASES_LOST.labels(_of)
for _kind in ("webhook", "notify"):
    DUPLICATES.labels(_kind)


@contextmanager
def timed(histogram: Histogram) -> Iterator[None]:
    """Observe how long the block takes; nothing where it raises."""
    began = time.perf_counter()
    yield
    histogram.observe(time.perf_counter() - began)


def count_recorder_report(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Count what a recorder's counters grew by since it last announced.

    Args:
        before: the health that it sent before; empty for none.
        now: the health that it sends.
    """
    earlier, later = _counts(before), _counts(now)
    for kind, counter in RECORDER_COUNTS.items():
        # A recorder that began anew counts from nought.
        grown = later[kind] - (earlier[kind] if earlier[kind] <= later[kind] else 0)
        if grown > 0:
            counter.inc(grown)


def _counts(health: Mapping[str, Any]) -> dict[str, int]:
    counts = health.get("counts")
    held = counts if isinstance(counts, Mapping) else {}
    return {kind: _whole(held.get(kind)) for kind in RECORDER_COUNTS}


def _whole(value: object) -> int:
    return min(value, 1 << 53) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def described() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Of each metric that processes count: its name as Prometheus shows it, type, labels and meaning."""
    for metric in _collectors():
        (family,) = metric.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, metric._labelnames, family.documentation  # noqa: SLF001 - it has no other way to tell


def _collectors() -> list[MetricWrapperBase]:
    return [value for value in globals().values() if isinstance(value, MetricWrapperBase)]


class _Shared(Collector):
    """The figures of all processes that share the folder; those of connections only of processes that live."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for pid in {
            int(file.stem.rpartition("_")[2]) for file in Path(self._folder).glob("gauge_live*_*.db")
        }:
            if not Path(f"/proc/{pid}").exists():
                mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]
        yield from MultiProcessCollector(CollectorRegistry(), self._folder).collect()  # type: ignore[no-untyped-call]


def registry(*others: Collector) -> CollectorRegistry:
    """What is to be shown: this process's figures, or those of all that share a folder, and others."""
    BUILD_INFO.labels(watchstep.__version__).set(1)
    folder = os.environ.get(FOLDER)
    shown = CollectorRegistry(auto_describe=False)
    shown.register(_Shared(folder) if folder else REGISTRY)
    for other in others:
        shown.register(other)
    return shown


def written(shown: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The figures, and the type of that text: OpenMetrics where ``Accept`` asks for it, else Prometheus' own."""
    encode, kind = choose_encoder(accept)
    return encode(shown), kind


def serve(settings: Settings, shown: CollectorRegistry) -> Callable[[], None]:
    """Answer on the metrics port, if there is one, from a thread; returns what ends that.

    Raises:
        ConfigError: the port cannot be listened on.
    """
    if not settings.metrics_port:
        return lambda: None
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, shown)
    except OSError as error:
        raise ConfigError(
            f"metrics at {settings.metrics_host}:{settings.metrics_port}: cannot be listened on ({error.strerror})",
            f"choose another {PREFIX}METRICS_PORT or {PREFIX}METRICS_HOST",
        ) from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
