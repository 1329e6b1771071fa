"""Launch a program on a cluster, recorded and judged, without a change to it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from watchstep.capture.identity import PROJECT, RUN, new_nonce, new_run_id
from watchstep.capture.service.location import local_folder
from watchstep.errors import ConfigError, StoreError
from watchstep.format.layout import check_name
from watchstep.hook import STORE
from watchstep.hook_arguments import ON_STOP, ON_STOP_WORDS, PROBES
from watchstep.platform.transport import SERVICE, TOKEN
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme
from watchstep.wrapper.environment import LAUNCHED
from watchstep_launch.backend import Backend, Launch, SubmissionRejectedError
from watchstep_launch.job import Job
from watchstep_launch.job_record import JobRecord, job_name
from watchstep_launch.job_status import end
from watchstep_launch.registration import Registering, config_of, known_as, recorder_token, settings_of
from watchstep_launch.relaunch import Relaunch, Requeue
from watchstep_launch.service_location import judge_of
from watchstep_rules.config.attached import AttachedRule, element_probes
from watchstep_rules.config.rule_config import RuleConfig

# The current folder, which Python would look into first, may hold modules of any name.
_RUN = "import sys; sys.path[:1] = []; from watchstep.command import main; main()"


@dataclass(frozen=True)
class Estimator:
    """What to launch, where, and what judges it.

    Attributes:
        program: a Python file, or a command line, as text or as its words: ``"train.py"``,
            ``"torchrun --nproc-per-node=2 train.py"``.
        backend: what runs it.
        store: where runs lie: a folder that its jobs see, or s3://, gs://, az://.
        rules: judge it, beside the service's own.
        arguments: of the program.
        environment: variables added to what the backend gives every job.
        folder: the working directory.
        project: of its runs.
        service: URL of the service that judges it, with WATCHSTEP_TOKEN (an operator's) and WATCHSTEP_RECORDER_TOKEN (what
            the job itself shows; a new one that records its run alone where it is not set). Left out, it is WATCHSTEP_SERVICE, or
            the one that serves the store on this machine; where there is none, one is started beside the job, and ends when nothing
            has run for five minutes.
        on_stop: what a stop asks of the program: "stop" (or "raise"): `StopTraining` at the end of a step, in all ranks at the same;
            "checkpoint": the same, once the program's own ``on_stop`` function, or its trainer, has saved one;
            `requeue`: as "stop", and launch it again from the last good checkpoint; or "ignore", which leaves it to the
            backend's stop.
        backend_name: under which an admin registered the backend with the service for this project; its kind where it is left
            out. The service stops the job through what is registered, by the settings that it has there.
    """

    program: str | Sequence[str]
    backend: Backend
    store: str | Path = "watchstep-runs"
    rules: Sequence[AttachedRule | RuleConfig] = ()
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | Path = "."
    project: str = "default"
    service: str = ""
    on_stop: Literal["stop", "checkpoint", "raise", "ignore"] | Requeue = "stop"
    backend_name: str = ""

    def __post_init__(self) -> None:
        """Refuse what the program would refuse only when it runs: it would train on, and nothing would watch it.

        Raises:
            ConfigError: ``on_stop`` is none of its words.
        """
        if not isinstance(self.on_stop, Requeue) and self.on_stop not in ON_STOP_WORDS:
            raise ConfigError(
                f"on_stop {self.on_stop!r}: there is none of this name",
                f"use {', '.join(map(repr, ON_STOP_WORDS))}, or requeue(…)",
            )

    def fit(self, *, run: str = "", wait: bool = True, show: bool | None = None) -> Job:
        """Launch it.

        Args:
            run: the run's id; a new one where it is left out.
            wait: return when it is over.
            show: how it is shown meanwhile; see `Job.wait`.

        Raises:
            SubmissionRejectedError: it cannot be started as it is.
            BackendDownError, CredentialsExpiredError: the backend did not take it. Nothing runs after any of these.
            RuleError, ServiceError: the service refuses a rule, or does not answer; nothing is launched.
            ConfigError: a name cannot be used, or no backend is registered under ``backend_name``; nothing is launched.
        """
        project = check_name("project", self.project)
        name, attempt = check_name("run", run or new_run_id()), new_nonce()
        words = self._words()
        store = self._store_url()
        judge = judge_of(self.service, store)
        address = judge.address()
        asked = Registering(address.operator, project, name)
        asked.know([config_of(rule) for rule in self.rules], "who launched it")
        if self.backend_name and judge.url:
            asked.check_backend(self.backend_name)
        bound_as = known_as(self.backend, judge, self.backend_name)
        given = {STORE: store, PROJECT: project, RUN: name, LAUNCHED: attempt, ON_STOP: self._said_of_stops}
        if probes := element_probes(map(config_of, self.rules)):
            given[PROBES] = " ".join(probes)
        given |= self._identity_of(store).variables(store)
        launch = Launch(
            (self._python(), "-c", _RUN, "run", "--", *words),
            {**self.environment, **given, SERVICE: address.recorder.url},
            Path(self.folder).expanduser().absolute(),
            name=job_name(name),
            secrets={TOKEN: recorder_token(address, project, name, judge.recorder_token)},
        )
        handle = self.backend.submit(launch)
        try:
            settings = settings_of(self.backend)
            record = JobRecord(project, name, attempt, store, handle, self.backend.kind, settings, judge)
            record = replace(record, relaunch=self._relaunch(launch, bound_as))
            record.save()
            asked.bind(attempt, replace(handle, backend=bound_as))
        except (
            BaseException
        ):  # a job that no service can stop, or that nobody finds again, is not left running
            end(self.backend, handle, 0.0)
            raise
        job = Job(record, self.backend)
        if wait:
            job.wait(show=show)
        return job

    @staticmethod
    def reattach(run: str, project: str = "default", *, backend: Backend | None = None) -> Job:
        """See `Job.reattach`."""
        return Job.reattach(run, project, backend=backend)

    def _words(self) -> list[str]:
        if isinstance(self.program, str):
            is_file = Path(self.folder, self.program).is_file()  # of which the name may have a space
            words = [self.program] if is_file else shlex.split(self.program)
        else:
            words = list(self.program)
        if not words:
            raise SubmissionRejectedError("program: none is named", 'Estimator("train.py", …)')
        if words[0].endswith(".py"):
            if self._shares_files and not Path(self.folder, words[0]).expanduser().is_file():
                raise SubmissionRejectedError(
                    f"program {words[0]!r}: not found in {Path(self.folder).absolute()}",
                    "check its name, or give folder=",
                )
            words = [self._python(), *words]
        return [*words, *self.arguments]

    def _identity_of(self, store: str) -> StoreIdentity:
        """The identity of a store that the job sees as this process does; an unknown one where the store is not there yet."""
        identity = StoreIdentity()
        if self._shares_files and local_folder(store) is not None:
            with contextlib.suppress(StoreError):  # the job makes it, or reports what is wrong with it
                Store.open(store, identity=identity)
        return identity

    @property
    def _said_of_stops(self) -> str:
        return "stop" if isinstance(self.on_stop, Requeue) else self.on_stop

    def _relaunch(self, launch: Launch, bound_as: str) -> Relaunch | None:
        if not isinstance(self.on_stop, Requeue):
            return None
        environment = {
            name: value for name, value in launch.environment.items() if name not in {LAUNCHED, SERVICE}
        }
        return Relaunch(launch.command, environment, str(launch.folder), bound_as, self.on_stop.limit)

    @property
    def _shares_files(self) -> bool:
        return bool(getattr(self.backend, "shares_files", False))

    def _python(self) -> str:
        return sys.executable if self._shares_files else "python"

    def _store_url(self) -> str:
        text = str(self.store)
        return (text if checked_scheme(text) else Path(text).expanduser().absolute().as_uri()).rstrip("/")
