"""What a backend of a test needs to be beside what the test is about: jobs that can be asked and stopped."""

from __future__ import annotations

from typing import ClassVar

from watchstep_launch.backend import JobHandle, Launch, LogPart


class Stoppable:
    """A backend that launches nothing; its tests say how its jobs are, and what stops them."""

    kind: ClassVar[str] = "stoppable"
    poll_seconds: ClassVar[float] = 0.0

    def submit(self, launch: Launch) -> JobHandle:
        raise NotImplementedError(launch)

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        del job
        return LogPart(b"", cursor)

    def jobs(self) -> list[JobHandle]:
        return []

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        raise NotImplementedError(id)

    def settled(self, job: JobHandle) -> JobHandle:
        return job
