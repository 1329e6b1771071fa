"""Launch an unmodified program on a backend, with recording and rules."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from watchstep.capture.config import CaptureConfig
from watchstep.capture.document.document import document_of
from watchstep.capture.document.files import CAPTURE, inline, inline_file
from watchstep.capture.identity import PROJECT, RUN, new_nonce, new_run_id
from watchstep.capture.service.location import local_folder
from watchstep.capture.service.run_store import require_store
from watchstep.errors import ConfigError, StoreError
from watchstep.format.capture_needs import encoded
from watchstep.format.layout import check_name
from watchstep.hook import STORE
from watchstep.hook_arguments import NEEDS, ON_STOP, ON_STOP_WORDS
from watchstep.platform.transport import SERVICE, TOKEN
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme
from watchstep.wrapper.environment import LAUNCHED
from watchstep_launch.backend import Backend, Launch, SubmissionRejectedError
from watchstep_launch.job import Job
from watchstep_launch.job_record import JobRecord, end, job_name
from watchstep_launch.registration import (
    LaunchRegistration,
    RegisteredLaunch,
    config_of,
    recorder_token,
    registered_name,
    settings_of,
)
from watchstep_launch.relaunch import Relaunch, Requeue
from watchstep_launch.service_location import locate_service
from watchstep_rules.config.attached import AttachedRule, capture_needs
from watchstep_rules.config.rule_config import RuleConfig

# The current folder comes first in Python's search path, and may contain modules of any name.
_RUN = "import sys; sys.path[:1] = []; from watchstep.command import main; main()"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Estimator:
    """A program to launch, its backend, and the rules that evaluate it.

    Attributes:
        program: a Python file, or a command line, as text or as its words: ``"train.py"``,
            ``"torchrun --nproc-per-node=2 train.py"``.
        backend: the backend that runs it.
        store: store for runs: a folder that its jobs can access, or s3://, gs://, az://.
        rules: rules to evaluate in addition to the service's own.
        capture: what its jobs record: the path of a capture file, its data, or a `watchstep.CaptureConfig`. The content travels in the
            job's environment. A program that sets ``Hook(config=…)`` itself overrides it. Default: the project's capture document,
            or the built-in configuration.
        arguments: the program's arguments.
        environment: variables added to those that the backend sets for every job.
        folder: the working directory.
        project: the project of its runs.
        service: URL of the service, with WATCHSTEP_TOKEN (an operator's token) and WATCHSTEP_RECORDER_TOKEN (the token that the
            job itself uses; by default a new one that only records its run). By default WATCHSTEP_SERVICE, or the service of the
            store on this machine. If there is none, one is started with the job, and ends when nothing has run for five
            minutes.
        on_stop: what a stop does in the program: "stop" (or "raise") raises `StopTraining` at the end of a step, the same step in all
            ranks; "checkpoint" does the same once the program's own ``on_stop`` function, or its trainer, has saved a checkpoint;
            `requeue` does the same as "stop", and launches the job again from the last good checkpoint; "ignore" leaves the
            stop to the backend.
        backend_name: name under which an admin registered the backend with the service for this project; by default its kind.
            The service stops the job through the registered backend, with the settings registered there.
    """

    program: str | Sequence[str]
    backend: Backend
    store: str | Path = "watchstep-runs"
    rules: Sequence[AttachedRule | RuleConfig] = ()
    capture: str | os.PathLike[str] | Mapping[str, Any] | CaptureConfig | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | Path = "."
    project: str = "default"
    service: str = ""
    on_stop: Literal["stop", "checkpoint", "raise", "ignore"] | Requeue = "stop"
    backend_name: str = ""

    def __post_init__(self) -> None:
        """Reject an invalid ``on_stop`` here: the program itself would ignore it, and train without being watched.

        Raises:
            ConfigError: ``on_stop`` is invalid.
        """
        if not isinstance(self.on_stop, Requeue) and self.on_stop not in ON_STOP_WORDS:
            raise ConfigError(
                f"invalid on_stop {self.on_stop!r}",
                f"use {', '.join(map(repr, ON_STOP_WORDS))}, or requeue(…)",
            )

    def fit(self, *, run: str = "", wait: bool = True, show: bool | None = None) -> Job:
        """Launch the program.

        Args:
            run: the run's id; a new one by default.
            wait: return when the job is over.
            show: how progress is shown while waiting; see `Job.wait`.

        Raises:
            SubmissionRejectedError: the program cannot be started as it is.
            BackendDownError, CredentialsExpiredError: the backend did not accept the job. After any of these errors, nothing runs.
            RuleError, ServiceError: the service refuses a rule, or does not answer; nothing is launched.
            ConfigError: a name or ``capture`` is invalid, or ``backend_name`` is not registered; nothing is launched.
        """
        capture = _inline_capture(self.capture)
        project = check_name("project", self.project)
        name, attempt = check_name("run", run or new_run_id()), new_nonce()
        words = self._words()
        store = self._store_url()
        service = locate_service(self.service, store)
        address = service.address()
        registration = LaunchRegistration(address.operator, project, name, store)
        registered = registration.register([config_of(rule) for rule in self.rules], "who launched it")
        if self.backend_name and service.url:
            registration.check_backend(self.backend_name)
        bound_as = registered_name(self.backend, service, self.backend_name)
        variables = {
            STORE: store,
            PROJECT: project,
            RUN: name,
            LAUNCHED: attempt,
            ON_STOP: self._on_stop_word,
        }
        own_needs = capture_needs(map(config_of, self.rules))
        if needs := encoded(dict.fromkeys((*own_needs, *registered.needs))):
            variables[NEEDS] = needs
        if not capture and CAPTURE not in self.environment:
            capture = self._project_capture(registered.capture)
        if capture:
            variables[CAPTURE] = capture
        variables |= self._identity_of(store, registered).variables(store)
        launch = Launch(
            (self._python(), "-c", _RUN, "run", "--", *words),
            {**self.environment, **variables, SERVICE: address.recorder.url},
            Path(self.folder).expanduser().absolute(),
            name=job_name(name),
            secrets={TOKEN: recorder_token(address, project, name, service.recorder_token)},
        )
        handle = self.backend.submit(launch)
        try:
            settings = settings_of(self.backend)
            record = JobRecord(project, name, attempt, store, handle, self.backend.kind, settings, service)
            record = replace(record, relaunch=self._relaunch(launch, bound_as))
            record.save()
            registration.bind(attempt, replace(handle, backend=bound_as))
        except (
            BaseException
        ):  # never keep a job running that no service can stop, or that cannot be found again
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
            is_file = Path(self.folder, self.program).is_file()  # a name may contain a space
            words = [self.program] if is_file else shlex.split(self.program)
        else:
            words = list(self.program)
        if not words:
            raise SubmissionRejectedError("program is empty", 'name one, as in Estimator("train.py", …)')
        if words[0].endswith(".py"):
            if self._shares_files and not Path(self.folder, words[0]).expanduser().is_file():
                raise SubmissionRejectedError(
                    f"program {words[0]!r}: not found in {Path(self.folder).absolute()}",
                    "check its name, or set folder=",
                )
            words = [self._python(), *words]
        return [*words, *self.arguments]

    def _project_capture(self, document: Any) -> str:
        """Return the project's capture document for the job; empty if there is none, or if it cannot be passed to the job."""
        if document is None:
            return ""
        source = f"capture document of project {self.project}"
        try:
            text = inline(document, source)
        except ConfigError as error:
            _log.warning("%s; the job records with the built-in configuration", error.what)
            return ""
        limit: int | None = getattr(self.backend, "longest_variable", None)
        if limit is not None and len(text) > limit:
            _log.warning(
                "%s: %d characters, more than the backend's limit of %d for a variable; the job records with the built-in configuration",
                source,
                len(text),
                limit,
            )
            return ""
        return text

    def _identity_of(self, store: str, registered: RegisteredLaunch) -> StoreIdentity:
        """Return the identity of a store that the job accesses like this process; an unknown identity if the store does not exist yet."""
        identity = StoreIdentity()
        if self._shares_files and local_folder(store) is not None:
            if registered.store is not None and require_store(identity, store, *registered.store):
                return identity
            with contextlib.suppress(StoreError):  # the job creates the store, or reports the error
                Store.open(store, identity=identity)
        return identity

    @property
    def _on_stop_word(self) -> str:
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


def _inline_capture(capture: Any) -> str:
    """Return a capture document for the environment of a job; empty if there is none.

    Raises:
        ConfigError: it is missing or invalid.
    """
    if capture is None:
        return ""
    if isinstance(capture, str | os.PathLike):
        return inline_file(capture)
    if isinstance(capture, CaptureConfig):
        return inline(document_of(capture), "Estimator(capture=…)")
    if isinstance(capture, Mapping):
        return inline(dict(capture), "Estimator(capture=…)")
    raise ConfigError(
        f"invalid capture={capture!r}"[:200], "use the path of a capture file, its data, or a CaptureConfig"
    )
