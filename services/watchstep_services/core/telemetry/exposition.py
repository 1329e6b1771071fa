"""Metrics as Prometheus reads them: on a port of their own, or as a response of the API.

A process that forks (a Celery worker, an API with several processes) shares a folder with its children, in which each
keeps its metrics; the process that is scraped sums them. `figures_folder` names it, before prometheus_client is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

import watchstep
from watchstep.errors import ConfigError
from watchstep_services.core.process import FOLDER
from watchstep_services.core.settings import PREFIX, Settings
from watchstep_services.core.telemetry import metrics


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
    metrics.BUILD_INFO.labels(watchstep.__version__).set(1)
    folder = os.environ.get(FOLDER)
    shown = CollectorRegistry(auto_describe=False)
    shown.register(_Shared(folder) if folder else metrics.REGISTRY)
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
