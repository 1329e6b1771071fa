"""The backend of jobs that the harness keeps: every call is counted there."""

from __future__ import annotations

import json
import urllib.request
from typing import ClassVar
from urllib.parse import quote

from watchstep.errors import ConfigError
from watchstep_launch.backend import JobHandle, JobStatus, Launch, LogPart

NAME = "counting"
_SECONDS = 30.0


class CountingBackend:
    """Asks the harness, and says what it says."""

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 0.0

    def __init__(self, harness: str) -> None:
        self._harness = harness

    def submit(self, launch: Launch) -> JobHandle:
        """Never.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{launch.command}: jobs of this kind are made by the harness", "bind one of them")

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """None are kept."""
        del job
        return LogPart(b"", cursor)

    def jobs(self) -> list[JobHandle]:
        """None are told."""
        return []

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """A job that the harness made."""
        return JobHandle(NAME, id, {})

    def settled(self, job: JobHandle) -> JobHandle:
        """It has one spelling."""
        return job

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is."""
        return self._call(job, "status")

    def stop(self, job: JobHandle) -> JobStatus:
        """Ask it to end."""
        return self._call(job, "stop")

    def kill(self, job: JobHandle) -> JobStatus:
        """End it."""
        return self._call(job, "kill")

    def _call(self, job: JobHandle, verb: str) -> JobStatus:
        url = f"{self._harness}/jobs/{quote(job.id, safe='')}/{verb}"
        request = urllib.request.Request(url, b"", method="POST")
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            said = json.loads(answer.read())
        return JobStatus("ended", said["exit_code"]) if said["gone"] else JobStatus("running")
