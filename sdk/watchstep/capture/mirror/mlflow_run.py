"""A run of MLflow. Metrics have steps of any order, so each point is written with its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from watchstep.capture.mirror.mirrored_run import PREFIX, AlertChange, MirroredPoint, OtherRun, RunLinks

_BATCH = 500
"""Metrics of one request; MLflow accepts 1000."""

_MAX_KEY = 250
_INVALID = re.compile(r"[^-\w. /]")


class MlflowRun:
    """The run that was active on the training thread."""

    def __init__(self, active: Any) -> None:
        """Create a client. The tracking server is the program's.

        Args:
            active: an ``mlflow.ActiveRun``.
        """
        import mlflow
        from mlflow.entities import Metric

        self._metric = Metric
        self._uri = str(mlflow.get_tracking_uri())
        self._client = mlflow.MlflowClient(self._uri)
        self._run_id = str(active.info.run_id)
        self._experiment = str(active.info.experiment_id)

    @property
    def identity(self) -> OtherRun:
        """Its id, and the address of its page if the tracking server has one."""
        parts = urlsplit(self._uri)
        if parts.scheme not in {"http", "https"}:
            return OtherRun(self._run_id, place=_without_credentials(self._uri))
        base = _without_credentials(self._uri).rstrip("/")
        return OtherRun(self._run_id, f"{base}/#/experiments/{self._experiment}/runs/{self._run_id}")

    @property
    def is_over(self) -> bool:
        """False: a finished run accepts metrics."""
        return False

    def link(self, links: RunLinks) -> None:
        """Set the tags ``watchstep.project``, ``watchstep.run``, ``watchstep.url`` and ``watchstep.page``."""
        for name, value in links.as_data().items():
            self._client.set_tag(self._run_id, f"{PREFIX}.{name}", value)

    def alert(self, change: AlertChange) -> None:
        """Set the tag ``watchstep.alert.<name>`` to the last change."""
        self._client.set_tag(self._run_id, _key(f"{PREFIX}.alert.{change.name}"), change.text)

    def write(self, points: Sequence[MirroredPoint]) -> int:
        """Write all points."""
        metrics = [
            self._metric(_key(name), value, point.time_ns // 1_000_000, point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH])
        return 0

    def close(self, *, is_stopped: bool) -> int:  # noqa: ARG002 - of the protocol
        """Do nothing: all points were written."""
        return 0


def _key(name: str) -> str:
    """Return a name that MLflow accepts."""
    return _INVALID.sub("_", name)[:_MAX_KEY]


def _without_credentials(uri: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.netloc else uri
