"""A launched job, from the side that launched it or that takes it up later."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from watchstep.client import Client, Event, RunState
from watchstep.errors import ServiceError
from watchstep.platform.terminal_text import printable
from watchstep_launch.backend import Backend, BackendDownError, JobHandle, JobStatus
from watchstep_launch.backend_registry import open_backend
from watchstep_launch.job_record import JobRecord, load
from watchstep_launch.job_status import end

if TYPE_CHECKING:
    from watchstep.reading.run import Run
    from watchstep_launch.view.show import Showing
    from watchstep_rules.config.attached import AttachedRule
    from watchstep_rules.config.rule_config import RuleConfig

ENDED = frozenset(("completed", "failed", "stopped", "lost"))
"""States of a run of which nothing more is to come."""

_FIRST_LOOK = 0.05
_LONGEST_LOOK = 5.0
_LONGEST_SLEEP = 0.5
_LAST_WORDS_SECONDS = 60.0

_log = logging.getLogger(__name__)


class Job:
    """A job with its run. It keeps nothing that `Job.reattach` in another process would not find again.

    Methods that ask the backend raise `BackendDownError` and `CredentialsExpiredError` where it does not answer or refuses; the
    job goes on meanwhile. Methods that ask the service raise `ServiceError`.

    Attributes:
        record: what it is, JSON-ready.
        backend: what it runs on.
    """

    def __init__(self, record: JobRecord, backend: Backend | None = None) -> None:
        self.record = record
        self.backend = open_backend(record.kind, record.settings) if backend is None else backend
        self._trouble = ""

    @classmethod
    def reattach(cls, run: str, project: str = "default", *, backend: Backend | None = None) -> Job:
        """The newest launch of a run from this machine, after the launcher has ended.

        Args:
            run: its id.
            project: its project.
            backend: for a backend of your own, which cannot be made of what is written down.

        Raises:
            NotFoundError: none is known here.
            ConfigError: its record cannot be used.
        """
        return cls(load(run, project), backend)

    @classmethod
    def attach(
        cls,
        run: str,
        job: str,
        rules: Sequence[AttachedRule | RuleConfig] = (),
        *,
        backend: Backend | None = None,
        backend_name: str = "",
        service: str = "",
    ) -> Job:
        """Take up a job that others launched and that records a run: have it judged by more rules, and stopped by them.

        Safe to repeat. Where it fails, the run is judged by no rule of these.

        Args:
            run: where it lies, ``<store>/<project>/<run>``, as a path or URL.
            job: ``KIND:ID``, as in ``slurm:1234``; of a local process its id.
            rules: judge it from its next rows on, beside the service's own. Those that say "stop" may stop it.
            backend: what the job runs on, where the settings of its kind are not the defaults.
            backend_name: under which the service knows the backend; its kind where it is left out.
            service: URL of the service, as `Estimator` takes it.

        Raises:
            NotFoundError: there is no such run, or no such job.
            ConfigError: run or job is over, or cannot be named so.
            ServiceError: the job is another project's, the run's attempt is bound to another job, or the service refuses
                or does not answer.
            BackendError: the job is another user's, or its backend does not answer.
        """
        from watchstep_launch.attach import attach

        record = attach(run, job, rules, backend=backend, backend_name=backend_name, service=service)
        return cls(record, backend)

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.run

    @property
    def handle(self) -> JobHandle:
        """The job on its backend."""
        return self.record.handle

    def status(self) -> JobStatus:
        """How the job is, by its backend."""
        return self.backend.status(self.handle)

    def logs(self, *, follow: bool = False) -> Iterator[bytes]:
        """The job's output so far, in pieces; with ``follow``, until it is over."""
        cursor, pause = "", _FIRST_LOOK
        while True:
            over = not follow or self.status().is_over
            part = self.backend.logs(self.handle, cursor)
            cursor = part.cursor
            if part.data:
                pause = _FIRST_LOOK
                yield part.data
            elif over:
                return
            else:
                time.sleep(max(pause, self.backend.poll_seconds))
                pause = min(_LONGEST_LOOK, 2 * pause)

    def run(self) -> Run:
        """What the job has recorded. Raises `NotFoundError` before it has begun to."""
        from watchstep.reading.run import open_run

        return open_run(f"{self.record.store}/{self.record.project}/{self.record.run}")

    def client(self) -> Client:
        """A client of the service that judges it.

        Raises:
            ServiceError: none does, or it cannot be started again.
        """
        if self.record.judge is None:
            raise ServiceError(
                f"run {self.record.project}/{self.record.run}: no service judges it",
                "launch with rules, or name a service",
            )
        address = self.record.judge.address().operator
        return Client(address.url, address.token, self.record.project)

    def run_state(self) -> RunState:
        """All that the service knows of the run."""
        return self.client().run(self.record.run)

    def events(self) -> Iterator[Event]:
        """Events of the run from its beginning, as they come, until this launch of it has ended.

        A connection that breaks is made again where it broke.
        """
        for event in self.client().follow(self.record.run, after=0):
            yield event
            if event.type == "watchstep.run.ended" and self._is_mine(str(event.data.get("attempt", ""))):
                return

    def wait(self, timeout: float | None = None, *, show: bool | None = None) -> JobStatus:
        """Wait until the job is over, and its run has been judged to the end; how the job ended.

        A cluster that does not answer is asked again. An interrupt ends the waiting, not the job, and a line on standard error
        says how to find the job again. How the run goes is shown meanwhile: in a terminal or a notebook as a picture, elsewhere as a
        line on standard error for each event. A job that is to be launched again (`requeue`) is, once a rule has stopped it,
        and waited for.

        Args:
            timeout: seconds; without an end where it is left out.
            show: True for a picture, False for lines; where it is left out, a picture where somebody watches: not where
                CI or WATCHSTEP_QUIET is set.

        Raises:
            TimeoutError: it is not over by then; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            status = self._awaited(deadline, show)
        except KeyboardInterrupt:
            sys.stderr.write(f"{printable(self._words_to_wait_again())}\n")
            raise
        if self._follows_another():
            return self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()), show=show)
        return status

    def stop(self, reason: str = "", *, grace_seconds: float = 30.0) -> None:
        """Stop the job, graded: its workers are asked first, then the backend, then it is killed.

        The service does it, and records it: of a job that is over, that there was nothing to stop. Where no service
        answers, the backend is asked from here.

        Args:
            reason: for people.
            grace_seconds: how long the job may take to end when no service answers; the service has its own setting.
        """
        try:
            self.client().stop(self.record.run, reason or "asked by its launcher")
        except ServiceError as error:
            _log.warning("run %s is stopped by its backend alone: %s", self.record.run, error.what)
            end(self.backend, self.handle, grace_seconds)

    def _follows_another(self) -> bool:
        """Whether the job was launched again, now or by somebody else meanwhile: this is that launch from here on."""
        from watchstep_launch.requeueing import launched_again

        following = launched_again(self.record, self.backend)
        if following is not None:
            self.record = following
        return following is not None

    def _awaited(self, deadline: float | None, show: bool | None) -> JobStatus:
        pause = _FIRST_LOOK
        with self._showing(show) as showing:
            while not (status := self._asked()).is_over:
                self._rest(pause, deadline, partial(showing.turn, self._told(status)))
                pause = min(_LONGEST_LOOK, 1.5 * pause)
            self._await_judgement(partial(showing.turn, self._told(status)))
            showing.turn(self._told(status), last=True)
        return status

    def _words_to_wait_again(self) -> str:
        project, run = self.record.project, self.record.run
        named = f'"{run}"' if project == "default" else f'"{run}", "{project}"'
        return (
            f"watchstep: no longer waiting for run {project}/{run}; nothing was stopped. "
            f"Job {self.handle.backend}:{self.handle.id} is found again by Estimator.reattach({named})"
        )

    def _asked(self) -> JobStatus:
        """How the job is. A trouble is told once, however often it is met."""
        try:
            status, trouble = self.status(), ""
        except BackendDownError as error:
            status, trouble = JobStatus("unknown", detail=error.what), error.what
        if trouble and trouble != self._trouble:
            _log.warning("job %s:%s: %s", self.handle.backend, self.handle.id, trouble)
        self._trouble = trouble
        return status

    def _rest(self, pause: float, deadline: float | None, turn: Callable[[], None]) -> None:
        """Wait until the backend may be asked again, and show meanwhile how the run goes."""
        until = time.monotonic() + max(pause, self.backend.poll_seconds)
        while True:
            turn()
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"job {self.handle.backend}:{self.handle.id} is not over yet; it goes on")
            if now >= until:
                return
            time.sleep(min(_LONGEST_SLEEP, until - now, until if deadline is None else deadline - now))

    def _await_judgement(self, turn: Callable[[], None]) -> None:
        """What a job wrote last is judged a moment after it has ended."""
        if self.record.judge is None:
            return
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        try:
            client = self.client()
            while not self._is_judged(client) and time.monotonic() < deadline:
                turn()
                time.sleep(10 * _FIRST_LOOK)
        except ServiceError as error:
            _log.warning("run %s: what it came to is not known yet: %s", self.record.run, error.what)

    def _showing(self, show: bool | None) -> Showing:
        from watchstep_launch.view.run_status import RunWatcher
        from watchstep_launch.view.show import Showing, kind_of

        judged = self.record.judge is not None
        watcher = RunWatcher(self.client, self.record.project, self.record.run) if judged else None
        return Showing(watcher, kind_of(show))

    def _told(self, status: JobStatus) -> str:
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        unseen = f": {status.detail}" if status.state == "unknown" and status.detail else ""
        return f"job {self.handle.backend}:{self.handle.id} {status.state}{code}{unseen}"

    def _is_judged(self, client: Client) -> bool:
        """Whether the run has ended. One that was launched again is told as it was before until the new attempt is looked at."""
        if client.run(self.record.run).info.state not in ENDED:
            return False
        if self.record.relaunch is None or not self.record.relaunch.done:
            return True
        ended = client.events(self.record.run, types=("watchstep.run.ended",))
        return any(self._is_mine(str(event.data.get("attempt", ""))) for event in ended)

    def _is_mine(self, attempt: str) -> bool:
        return attempt == self.record.attempt or attempt.startswith(f"{self.record.attempt}-r")

    def __repr__(self) -> str:
        named: Any = f"{self.record.project}/{self.record.run}"
        return f"Job({named}, {self.handle.backend}:{self.handle.id})"
