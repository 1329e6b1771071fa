"""What a launched job shows to the service: a token that records its run and no more, wherever there can be one."""

from __future__ import annotations

import logging

from watchstep.capture.service_location import FoundService
from watchstep.transport import MissingError, RefusedError, Transport, segment

LIFETIME_SECONDS = 7 * 86_400
"""Of a token for the whole project, from a service that makes none for single runs. A job that runs for longer goes on recording, and
the service finds what it writes by looking."""

_MOST_NAME = 128
_REQUEST_SECONDS = 30.0

_log = logging.getLogger(__name__)


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
    asked = Transport(found.operator, _REQUEST_SECONDS)
    root, name = f"/v1/projects/{segment(project)}", f"job of run {run}"[:_MOST_NAME]
    try:
        return str(asked.call("POST", f"{root}/runs/{segment(run)}/tokens", body={"name": name})["token"])
    except RefusedError as error:
        refusal = error
    of_project = _of_project(asked, root, name) if isinstance(refusal, MissingError) else None
    given = of_project or found.recorder.token
    _log.warning(
        "run %s/%s: its job is given %s (%s); %s",
        project, run, _told(given, found, of_project), refusal.what, _mend(refusal),
    )  # fmt: skip
    return given


def _of_project(asked: Transport, root: str, name: str) -> str | None:
    """What an older service makes for an admin."""
    body = {"role": "recorder", "name": name, "lifetime_seconds": LIFETIME_SECONDS}
    try:
        return str(asked.call("POST", f"{root}/tokens", body=body)["token"])
    except RefusedError:
        return None


def _told(given: str, found: FoundService, of_project: str | None) -> str:
    if of_project:
        return "a token that records every run of the project, for a week"
    if given == found.operator.token:
        return "the launcher's own token, which may do more than record"
    return "the service's token for programs of this machine, which records every run"


def _mend(refusal: RefusedError) -> str:
    if isinstance(refusal, MissingError):
        return "update the service, which makes no tokens of single runs yet, or set WATCHSTEP_RECORDER_TOKEN to a recorder's"
    return "set WATCHSTEP_RECORDER_TOKEN to a recorder's, or launch with the token that registered the run, or an admin's"
