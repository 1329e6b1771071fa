"""What a launched job shows to the service: a token that may record and no more, wherever there can be one."""

from __future__ import annotations

import logging

from watchstep.client.transport import RefusedError, Transport, segment
from watchstep.launch.run_command import FoundService

LIFETIME_SECONDS = 7 * 86_400
"""A job that runs for longer goes on recording, and the service finds what it writes by looking."""

_MOST_NAME = 128
_REQUEST_SECONDS = 30.0

_log = logging.getLogger(__name__)


def recorder_token(found: FoundService, project: str, run: str) -> str:
    """The token for a job: the one that was named for jobs, else a new one for its project that ends after a week.

    Where the launcher's own token may make none, it is the launcher's own, and a warning says so.

    Raises:
        ServiceError: the service does not answer.
    """
    own, named = found.operator.token, found.recorder.token
    if named != own or not own:
        return named
    body = {
        "role": "recorder",
        "name": f"job of run {run}"[:_MOST_NAME],
        "lifetime_seconds": LIFETIME_SECONDS,
    }
    try:
        made = Transport(found.operator, _REQUEST_SECONDS).call(
            "POST", f"/v1/projects/{segment(project)}/tokens", body=body
        )
    except RefusedError as error:
        _log.warning(
            "run %s/%s: its job is given the launcher's own token, which may do more than record (%s); set"
            " WATCHSTEP_RECORDER_TOKEN to a recorder's, or launch with an admin's token",
            project, run, error.what,
        )  # fmt: skip
        return own
    return str(made["token"])
