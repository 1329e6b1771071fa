"""A launched job, for its launcher or for a process that finds it later."""

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
from watchstep_launch.backend import Backend, BackendDownError, JobHandle, JobStatus, open_backend
from watchstep_launch.job_record import JobRecord, end, load

if TYPE_CHECKING:
    from watchstep.reading.run import Run
    from watchstep_launch.view.show import Showing
    from watchstep_rules.config.attached import AttachedRule
    from watchstep_rules.config.rule_config import RuleConfig

ENDED = frozenset(("completed", "failed", "stopped", "lost"))
"""Final states of a run."""

_FIRST_PAUSE = 0.05
_MAX_PAUSE = 5.0
_MAX_SLEEP = 0.5
_EVALUATION_SECONDS = 60.0

_log = logging.getLogger(__name__)


class Job:
    """A job with its run. `Job.reattach` in another process restores all of its state.

    Methods that query the backend raise `BackendDownError` and `CredentialsExpiredError` if it does not answer or refuses; the
    job continues meanwhile. Methods that query the service raise `ServiceError`.

    Attributes:
        record: description of the job, JSON-ready.
        backend: the backend that it runs on.
    """

    def __init__(self, record: JobRecord, backend: Backend | None = None) -> None:
        self.record = record
        self.backend = open_backend(record.kind, record.settings) if backend is None else backend
        self._trouble = ""

    @classmethod
    def reattach(cls, run: str, project: str = "default", *, backend: Backend | None = None) -> Job:
        """Return the newest launch of a run from this machine, after its launcher has ended.

        Args:
            run: the run's id.
            project: the run's project.
            backend: for a custom backend, which cannot be restored from the record.

        Raises:
            NotFoundError: no launch is known on this machine.
            ConfigError: the record is invalid.
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
        """Attach to a job that others launched and that records a run: evaluate it with more rules, which may stop it.

        Safe to repeat. If it fails, none of these rules is evaluated.

        Args:
            run: path or URL of the run, ``<store>/<project>/<run>``.
            job: ``KIND:ID``, as in ``slurm:1234``; the id of a local process is its process id.
            rules: rules to evaluate from the next rows on, in addition to the service's own. Those with the action "stop" may stop it.
            backend: the job's backend, if its settings are not the defaults of its kind.
            backend_name: name of the backend with the service; by default its kind.
            service: URL of the service, as for `Estimator`.

        Raises:
            NotFoundError: the run or the job does not exist.
            ConfigError: the run or the job is over, or its name is invalid.
            ServiceError: the job belongs to another project, the run's attempt is bound to another job, or the service refuses
                or does not answer.
            BackendError: the job belongs to another user, or its backend does not answer.
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
        """Return the job's status, as its backend reports it."""
        return self.backend.status(self.handle)

    def logs(self, *, follow: bool = False) -> Iterator[bytes]:
        """Yield the job's output so far, in pieces; with ``follow``, until the job is over."""
        cursor, pause = "", _FIRST_PAUSE
        while True:
            over = not follow or self.status().is_over
            part = self.backend.logs(self.handle, cursor)
            cursor = part.cursor
            if part.data:
                pause = _FIRST_PAUSE
                yield part.data
            elif over:
                return
            else:
                time.sleep(max(pause, self.backend.poll_seconds))
                pause = min(_MAX_PAUSE, 2 * pause)

    def run(self) -> Run:
        """Open what the job has recorded. Raises `NotFoundError` before it has started to record."""
        from watchstep.reading.run import open_run

        return open_run(f"{self.record.store}/{self.record.project}/{self.record.run}")

    def client(self) -> Client:
        """Return a client of the service that evaluates the run.

        Raises:
            ServiceError: there is no such service, or it cannot be started again.
        """
        if self.record.service is None:
            raise ServiceError(
                f"no service evaluates run {self.record.project}/{self.record.run}",
                "launch with rules, or name a service",
            )
        address = self.record.service.address().operator
        return Client(address.url, address.token, self.record.project)

    def run_state(self) -> RunState:
        """Return the service's view of the run."""
        return self.client().run(self.record.run)

    def events(self) -> Iterator[Event]:
        """Yield the run's events from its beginning, as they arrive, until this launch has ended.

        After a broken connection it continues with the next event.
        """
        for event in self.client().follow(self.record.run, after=0):
            yield event
            if event.type == "io.watchstep.run.ended" and self._is_mine(str(event.data.get("attempt", ""))):
                return

    def wait(self, timeout: float | None = None, *, show: bool | None = None) -> JobStatus:
        """Wait until the job is over and its run has been evaluated completely. Returns the job's final status.

        A backend that does not answer is polled again. An interrupt ends the waiting, not the job, and prints to standard error
        how to find the job again. Progress is shown meanwhile: in a terminal or a notebook as a picture, elsewhere as a
        line on standard error for each event. With `requeue`, a job that a rule has stopped is launched again, and waited for.

        Args:
            timeout: seconds; unlimited by default.
            show: True for a picture, False for lines; by default a picture if the output is interactive and neither CI nor
                WATCHSTEP_QUIET is set.

        Raises:
            TimeoutError: the job is not over by then; it continues.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            status = self._wait_for_end(deadline, show)
        except KeyboardInterrupt:
            sys.stderr.write(f"{printable(self._reattach_message())}\n")
            raise
        if self._was_relaunched():
            return self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()), show=show)
        return status

    def stop(self, reason: str = "", *, grace_seconds: float = 30.0) -> None:
        """Stop the job in stages: request a stop from its workers, then from the backend, then kill it.

        The service does this and records it, also if the job is already over. If no service answers, this process requests the stop
        from the backend.

        Args:
            reason: for people.
            grace_seconds: how long the job may take to end if no service answers; the service has its own setting.
        """
        try:
            self.client().stop(self.record.run, reason or "requested by its launcher")
        except ServiceError as error:
            _log.warning("run %s is stopped by its backend alone: %s", self.record.run, error.what)
            end(self.backend, self.handle, grace_seconds)

    def _was_relaunched(self) -> bool:
        """Launch the job again if that is due, here or by another process. Afterwards this object is the new launch."""
        from watchstep_launch.requeueing import launched_again

        following = launched_again(self.record, self.backend)
        if following is not None:
            self.record = following
        return following is not None

    def _wait_for_end(self, deadline: float | None, show: bool | None) -> JobStatus:
        pause = _FIRST_PAUSE
        with self._showing(show) as showing:
            while not (status := self._poll_status()).is_over:
                self._pause(pause, deadline, partial(showing.turn, self._describe(status)))
                pause = min(_MAX_PAUSE, 1.5 * pause)
            self._await_evaluation(partial(showing.turn, self._describe(status)))
            showing.turn(self._describe(status), last=True)
        return status

    def _reattach_message(self) -> str:
        project, run = self.record.project, self.record.run
        arguments = f'"{run}"' if project == "default" else f'"{run}", "{project}"'
        return (
            f"watchstep: no longer waiting for run {project}/{run}; nothing was stopped. "
            f"Find job {self.handle.backend}:{self.handle.id} again with Estimator.reattach({arguments})"
        )

    def _poll_status(self) -> JobStatus:
        """Return the job's status. A repeated error is logged once."""
        try:
            status, trouble = self.status(), ""
        except BackendDownError as error:
            status, trouble = JobStatus("unknown", detail=error.what), error.what
        if trouble and trouble != self._trouble:
            _log.warning("job %s:%s: %s", self.handle.backend, self.handle.id, trouble)
        self._trouble = trouble
        return status

    def _pause(self, pause: float, deadline: float | None, turn: Callable[[], None]) -> None:
        """Wait until the backend may be polled again, and show the run's progress meanwhile."""
        until = time.monotonic() + max(pause, self.backend.poll_seconds)
        while True:
            turn()
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(
                    f"job {self.handle.backend}:{self.handle.id} is not over yet; it continues"
                )
            if now >= until:
                return
            time.sleep(min(_MAX_SLEEP, until - now, until if deadline is None else deadline - now))

    def _await_evaluation(self, turn: Callable[[], None]) -> None:
        """Wait for the evaluation of the job's last rows, which ends shortly after the job."""
        if self.record.service is None:
            return
        deadline = time.monotonic() + _EVALUATION_SECONDS
        try:
            client = self.client()
            while not self._is_evaluated(client) and time.monotonic() < deadline:
                turn()
                time.sleep(10 * _FIRST_PAUSE)
        except ServiceError as error:
            _log.warning("run %s: its result is not known yet: %s", self.record.run, error.what)

    def _showing(self, show: bool | None) -> Showing:
        from watchstep_launch.view.run_status import RunWatcher
        from watchstep_launch.view.show import Showing, kind_of

        has_service = self.record.service is not None
        watcher = RunWatcher(self.client, self.record.project, self.record.run) if has_service else None
        return Showing(watcher, kind_of(show))

    def _describe(self, status: JobStatus) -> str:
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        detail = f": {status.detail}" if status.state == "unknown" and status.detail else ""
        return f"job {self.handle.backend}:{self.handle.id} {status.state}{code}{detail}"

    def _is_evaluated(self, client: Client) -> bool:
        """Whether the run has ended. After a relaunch, the service reports the old state until it evaluates the new attempt."""
        if client.run(self.record.run).info.state not in ENDED:
            return False
        if self.record.relaunch is None or not self.record.relaunch.done:
            return True
        ended = client.events(self.record.run, types=("io.watchstep.run.ended",))
        return any(self._is_mine(str(event.data.get("attempt", ""))) for event in ended)

    def _is_mine(self, attempt: str) -> bool:
        return attempt == self.record.attempt or attempt.startswith(f"{self.record.attempt}-r")

    def __repr__(self) -> str:
        name: Any = f"{self.record.project}/{self.record.run}"
        return f"Job({name}, {self.handle.backend}:{self.handle.id})"
