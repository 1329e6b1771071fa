"""What a launcher asks of the service for a run: to know it, to judge it by rules, to bind its job, and a token for the job that records its run and no more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watchstep.capture.service.location import FoundService
from watchstep.errors import ConfigError, WatchstepError
from watchstep.platform.transport import MissingError, ServiceAddress, ServiceRefusedError, Transport, segment
from watchstep_launch import backend_registry
from watchstep_launch.backend import JobHandle
from watchstep_launch.service_location import Judge
from watchstep_rules.config.attached import AttachedRule
from watchstep_rules.config.rule_config import RuleConfig

_REQUEST_SECONDS = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registering:
    """One run at one service. Every method may be repeated.

    Attributes:
        address: of the service, with an operator's token.
        project: of the run.
        run: its id.
    """

    address: ServiceAddress
    project: str
    run: str

    def know(self, rules: Sequence[RuleConfig], who: str) -> None:
        """Make the run known, with rules; those that say "stop" may stop jobs of the project from now on.

        What the service cannot do that a rule asks for, as telling a receiver that it does not know, is logged.

        Args:
            rules: to judge it by, beside the service's own.
            who: by whose word they may, for the record: "who launched it".

        Raises:
            ServiceError: the service refuses a rule or the token, or does not answer.
        """
        body: dict[str, Any] = {"run": self.run, "rules": [rule.as_data() for rule in rules]}
        if any(rule.stops for rule in rules):
            body["allow_stop"] = f"attached to {self.project}/{self.run} with 'stop' by {who}"
        answer = self._asked("POST", "/runs", body) or {}
        for rule in answer.get("rules", ()):
            for warning in rule.get("warnings", ()):
                _log.warning("run %s: rule %s: %s", self.run, rule["name"], warning)

    def bind(self, attempt: str, job: JobHandle) -> None:
        """Say which job an attempt is; its backend goes by the name that the service knows.

        Raises:
            ServiceError: the backend is not registered, the job is another project's, or the attempt is another job.
        """
        held = {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}
        self._call("PUT", f"/{segment(self.run)}/job", {"attempt": attempt, "job": held})

    def location(self) -> str:
        """Where the service reads the project's runs: a URL, or a path of its machine.

        Raises:
            ServiceError: it does not answer, or there is no such project.
        """
        return str(self._asked("GET", "")["location"])

    def check_backend(self, name: str) -> None:
        """See that the project's jobs may run on the backend that an admin registered under this name.

        Raises:
            ConfigError: they may not, or there is none.
            ServiceError: the service does not answer, or there is no such project.
        """
        known = [str(one) for one in self._asked("GET", "")["backends"]]
        if name not in known:
            others = f"use one of: {', '.join(known)}" if known else "none is registered for it"
            raise ConfigError(
                f"backend {name!r}: not registered for project {self.project!r}",
                f"{others}; an admin registers others",
            )

    def _call(self, method: str, path: str, body: dict[str, Any]) -> None:
        self._asked(method, f"/runs{path}", body)

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        project = f"/v1/projects/{segment(self.project)}{path}"
        return Transport(self.address, _REQUEST_SECONDS).call(method, project, body=body)


def config_of(rule: AttachedRule | RuleConfig) -> RuleConfig:
    """A rule as its config.

    Raises:
        WatchstepError: it is none.
    """
    if isinstance(rule, AttachedRule):
        return rule.config
    if isinstance(rule, RuleConfig):
        return rule
    raise WatchstepError(f"rule {rule!r}: no rule", "attach rules as from watchstep_rules import nan_or_inf")


def settings_of(backend: Any) -> dict[str, Any]:
    """A backend's settings, where it is made of them (`BackendModel`)."""
    dump = getattr(backend, "model_dump", None)
    return {} if dump is None else dict(dump(mode="json", exclude_defaults=True))


def known_as(backend: Any, judge: Judge, named: str = "") -> str:
    """The name under which a service knows a backend: the one that is given, its kind, or one in the file of this machine's owner."""
    if named:
        return named
    if not judge.home:
        return str(backend.kind)
    return backend_registry.put(
        Path(judge.home) / backend_registry.BACKENDS_FILE, str(backend.kind), settings_of(backend)
    )


LIFETIME_SECONDS = 7 * 86_400
"""Of a token for the whole project, from a service that makes none for single runs. A job that runs for longer goes on recording, and
the service finds what it writes by looking."""

_MOST_NAME = 128
_TOKEN_SECONDS = 30.0


def recorder_token(found: FoundService, project: str, run: str, named: str = "") -> str:
    """The token for a job: the one that was named for jobs, else a new one for its run, which the service knows already.

    Where there can be none, it is one that may do more, and a warning says so: for the run's project, or the one that is there.

    Args:
        found: the service, with the launcher's own token.
        project: of the run.
        run: its name.
        named: the token that the user named for jobs; empty for none.

    Raises:
        ServiceError: the service does not answer.
    """
    if named or not found.operator.token:
        return named or found.recorder.token
    asked = Transport(found.operator, _TOKEN_SECONDS)
    root, name = f"/v1/projects/{segment(project)}", f"job of run {run}"[:_MOST_NAME]
    try:
        return str(asked.call("POST", f"{root}/runs/{segment(run)}/tokens", body={"name": name})["token"])
    except ServiceRefusedError as error:
        refusal = error
    of_project = _of_project(asked, root, name) if isinstance(refusal, MissingError) else None
    given = of_project or found.recorder.token
    _log.warning(
        "run %s/%s: its job is given %s (%s); %s",
        project, run, _told(given, found, of_project), refusal.what, _hint(refusal),
    )  # fmt: skip
    return given


def _of_project(asked: Transport, root: str, name: str) -> str | None:
    """What an older service makes for an admin."""
    body = {"role": "recorder", "name": name, "lifetime_seconds": LIFETIME_SECONDS}
    try:
        return str(asked.call("POST", f"{root}/tokens", body=body)["token"])
    except ServiceRefusedError:
        return None


def _told(given: str, found: FoundService, of_project: str | None) -> str:
    if of_project:
        return "a token that records every run of the project, for a week"
    if given == found.operator.token:
        return "the launcher's own token, which may do more than record"
    return "the service's token for programs of this machine, which records every run"


def _hint(refusal: ServiceRefusedError) -> str:
    if isinstance(refusal, MissingError):
        return "update the service, which makes no tokens of single runs yet, or set WATCHSTEP_RECORDER_TOKEN to a recorder's"
    return "set WATCHSTEP_RECORDER_TOKEN to a recorder's, or launch with the token that registered the run, or an admin's"
