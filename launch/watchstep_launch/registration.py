"""Requests of a launcher to the service: register a run with its rules, bind its job, and create a token that only records the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watchstep.capture.service.client import store_in
from watchstep.capture.service.location import FoundService
from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.capture_needs import CaptureNeed, needs_from_data
from watchstep.platform.transport import MissingError, ServiceAddress, ServiceRefusedError, Transport, segment
from watchstep_launch.backend import BACKENDS_FILE, JobHandle, put
from watchstep_launch.service_location import ServiceReference
from watchstep_rules.config.attached import AttachedRule
from watchstep_rules.config.rule_config import RuleConfig

_REQUEST_SECONDS = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegisteredLaunch:
    """What a service says about a run when it is registered.

    Attributes:
        capture: the capture document of the project, as data; None if it has none.
        needs: what the rules of the run need its recorder to capture, those of the service's owner and of the project included.
        store: URL and id of the run's store; None for a bucket, and if the service has not read the store yet.
    """

    capture: Any
    needs: tuple[CaptureNeed, ...]
    store: tuple[str, str] | None


@dataclass(frozen=True)
class LaunchRegistration:
    """Registers one run with one service. Every method may be repeated.

    Attributes:
        address: address of the service, with an operator's token.
        project: the run's project.
        run: the run's id.
        store_url: the store that it is recorded to.
    """

    address: ServiceAddress
    project: str
    run: str
    store_url: str

    def register(self, rules: Sequence[RuleConfig], who: str) -> RegisteredLaunch:
        """Register the run with rules. Rules with the action "stop" may stop jobs of the project from now on.

        Requests of a rule that the service cannot fulfil, such as an unknown receiver, are logged.

        Args:
            rules: rules to evaluate in addition to the service's own.
            who: who permits stops, for the audit record: "who launched it".

        Raises:
            ServiceError: the service refuses a rule or the token, or does not answer.
        """
        body: dict[str, Any] = {
            "run": self.run, "rules": [rule.as_data() for rule in rules], "store": self.store_url,
        }  # fmt: skip
        if any(rule.stops for rule in rules):
            body["allow_stop"] = f"attached to {self.project}/{self.run} with 'stop' by {who}"
        answer = self._request("POST", "/runs", body) or {}
        for rule in answer.get("rules", ()):
            for warning in rule.get("warnings", ()):
                _log.warning("run %s: rule %s: %s", self.run, rule["name"], warning)
        control = answer.get("control")
        try:
            needs = needs_from_data(control.get("needs", ()) if isinstance(control, dict) else ())
        except ValueError as error:  # of a later version
            _log.warning(
                "run %s: what its rules need the recorder to capture is not known: %s", self.run, error
            )
            needs = ()
        return RegisteredLaunch(answer.get("capture"), needs, store_in(answer))

    def bind(self, attempt: str, job: JobHandle) -> None:
        """Bind an attempt to its job. The job's backend has the name that the service knows.

        Raises:
            ServiceError: the backend is not registered, the job belongs to another project, or the attempt is bound to another job.
        """
        data = {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}
        self._request("PUT", f"/runs/{segment(self.run)}/job", {"attempt": attempt, "job": data})

    def location(self) -> str:
        """Return where the service reads the registered run: a URL, or a path on its machine.

        Raises:
            ServiceError: the service does not answer, or the run is not registered.
        """
        return str(self._request("GET", f"/runs/{segment(self.run)}")["store"])

    def check_backend(self, name: str) -> None:
        """Check that the project's jobs may run on the backend that an admin registered under this name.

        Raises:
            ConfigError: the backend is not registered for the project.
            ServiceError: the service does not answer, or the project does not exist.
        """
        names = [str(backend) for backend in self._request("GET", "")["backends"]]
        if name not in names:
            others = f"use one of: {', '.join(names)}" if names else "the project has no registered backend"
            raise ConfigError(
                f"backend {name!r} is not registered for project {self.project!r}",
                f"{others}; an admin can register backends",
            )

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"/v1/projects/{segment(self.project)}{path}"
        return Transport(self.address, _REQUEST_SECONDS).call(method, url, body=body)


def config_of(rule: AttachedRule | RuleConfig) -> RuleConfig:
    """Return a rule's config.

    Raises:
        WatchstepError: the object is not a rule.
    """
    if isinstance(rule, AttachedRule):
        return rule.config
    if isinstance(rule, RuleConfig):
        return rule
    raise WatchstepError(
        f"{rule!r} is not a rule", "pass rules such as those of 'from watchstep_rules import nan_or_inf'"
    )


def settings_of(backend: Any) -> dict[str, Any]:
    """Return a backend's settings; empty for a backend that is not a `BackendModel`."""
    dump = getattr(backend, "model_dump", None)
    return {} if dump is None else dict(dump(mode="json", exclude_defaults=True))


def registered_name(backend: Any, service: ServiceReference, name: str = "") -> str:
    """Return the name under which a service knows a backend: ``name``, the backend's kind, or a name in the local backends file."""
    if name:
        return name
    if not service.home:
        return str(backend.kind)
    return put(Path(service.home) / BACKENDS_FILE, str(backend.kind), settings_of(backend))


LIFETIME_SECONDS = 7 * 86_400
"""Lifetime of a token for the whole project, from a service without tokens for single runs. A job that runs for longer continues to
record, and the service discovers its segments by listing the store."""

_MAX_NAME_LENGTH = 128
_TOKEN_SECONDS = 30.0


def recorder_token(service: FoundService, project: str, run: str, configured: str = "") -> str:
    """Return the token for a job: the configured one, or a new one for its run, which must be registered.

    If the service cannot create one, returns a token with more permissions, for the run's project or an existing one, and logs a
    warning.

    Args:
        service: the service, with the launcher's own token.
        project: the run's project.
        run: the run's id.
        configured: the token that the user configured for jobs; empty for none.

    Raises:
        ServiceError: the service does not answer.
    """
    if configured or not service.operator.token:
        return configured or service.recorder.token
    transport = Transport(service.operator, _TOKEN_SECONDS)
    root, name = f"/v1/projects/{segment(project)}", f"job of run {run}"[:_MAX_NAME_LENGTH]
    try:
        return str(transport.call("POST", f"{root}/runs/{segment(run)}/tokens", body={"name": name})["token"])
    except ServiceRefusedError as error:
        refusal = error
    of_project = _project_token(transport, root, name) if isinstance(refusal, MissingError) else None
    token = of_project or service.recorder.token
    _log.warning(
        "run %s/%s: its job is given %s (%s); %s",
        project, run, _describe_token(token, service, of_project), refusal.what, _hint(refusal),
    )  # fmt: skip
    return token


def _project_token(transport: Transport, root: str, name: str) -> str | None:
    """Create a token for the whole project; older services do this for admins only."""
    body = {"role": "recorder", "name": name, "lifetime_seconds": LIFETIME_SECONDS}
    try:
        return str(transport.call("POST", f"{root}/tokens", body=body)["token"])
    except ServiceRefusedError:
        return None


def _describe_token(token: str, service: FoundService, of_project: str | None) -> str:
    if of_project:
        return "a token that records every run of the project, for a week"
    if token == service.operator.token:
        return "the launcher's own token, which may do more than record"
    return "the service's token for programs of this machine, which records every run"


def _hint(refusal: ServiceRefusedError) -> str:
    if isinstance(refusal, MissingError):
        return "update the service, which does not create tokens for single runs yet, or set WATCHSTEP_RECORDER_TOKEN to a recorder's token"
    return "set WATCHSTEP_RECORDER_TOKEN to a recorder's token, or launch with the token that registered the run, or with an admin's token"
