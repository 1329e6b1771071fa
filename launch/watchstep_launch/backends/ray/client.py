"""Ray's own client of its Jobs API, with a deadline for each request, and its refusals told apart. Needs ``ray[default]``."""

from __future__ import annotations

from typing import Any, NoReturn

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from watchstep_launch.backend import BackendDownError, CredentialsExpiredError
from watchstep_launch.backends.ray.submission import reason_in

SECONDS = 20.0

_UNUSABLE = (
    TypeError,
    ValueError,
    NotImplementedError,
    FileNotFoundError,
    NotADirectoryError,
    PermissionError,
)
"""What Ray's client raises of a runtime environment that it cannot use, before it asks the cluster."""


class RayRefusedError(Exception):
    """The Jobs API answered with an error: ``code`` is HTTP's, ``said`` its text."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.said = said

    @property
    def reason(self) -> str:
        """The line that says why."""
        return reason_in(self.said) or f"HTTP {self.code}"


class RayClient:
    """The calls that are used of it.

    All raise `BackendDownError`, `CredentialsExpiredError`, and `RayRefusedError` for what else is refused.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = self._asked(_Client, address)

    def submit(self, **what: Any) -> str:
        """The id of a new job. Raises `RayRefusedError` also of what Ray's own client does not pass on."""

        def checked() -> str:
            try:
                return str(self._client.submit_job(**what))
            except requests.RequestException:
                raise  # some are ValueErrors as well
            except _UNUSABLE as error:
                raise RayRefusedError(400, f"{type(error).__name__}: {error}") from error

        return str(self._asked(checked))

    def details(self, job_id: str) -> JobDetails | None:
        """How a job is; None where there is none."""
        try:
            found: JobDetails = self._asked(self._client.get_job_info, job_id)
        except RayRefusedError as error:
            if error.code == requests.codes.not_found:
                return None
            raise
        return found

    def all(self) -> list[JobDetails]:
        """All jobs that the cluster remembers."""
        return list(self._asked(self._client.list_jobs))

    def stop(self, job_id: str) -> None:
        """SIGTERM to all processes of a job, and SIGKILL some time after."""
        self._asked(self._client.stop_job, job_id)

    def logs(self, job_id: str) -> str:
        """All that a job wrote."""
        return str(self._asked(self._client.get_job_logs, job_id))

    def _asked(self, call: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except AuthenticationError as error:
            raise self._unwelcome(str(error)) from error
        except RayRefusedError as error:
            if error.code in (requests.codes.unauthorized, requests.codes.forbidden):
                raise self._unwelcome(error.reason) from error
            if error.code in (429, 502, 503, 504):
                raise self._down(error.reason) from error
            raise
        except (OSError, RuntimeError) as error:  # requests' own errors are OSErrors
            raise self._down(str(error)) from error

    def _down(self, why: str) -> BackendDownError:
        return BackendDownError(
            f"Ray at {self._address}: does not answer ({why[:300]})",
            "see whether its dashboard runs, and its address",
        )

    def _unwelcome(self, why: str) -> CredentialsExpiredError:
        return CredentialsExpiredError(
            f"Ray at {self._address}: refused ({why[:300]})",
            "give its token by RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )


class _Client(JobSubmissionClient):  # type: ignore[misc, unused-ignore]
    def _do_request(self, method: str, endpoint: str, **named: Any) -> requests.Response:
        named.setdefault("timeout", SECONDS)
        answer: requests.Response = super()._do_request(method, endpoint, **named)
        return answer

    def _raise_error(self, r: requests.Response) -> NoReturn:
        raise RayRefusedError(r.status_code, r.text)
