"""Ray's client of its Jobs API, with a deadline for each request and classified errors. Requires ``ray[default]``."""

from __future__ import annotations

from typing import Any, NoReturn

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from watchstep_launch.backend import BackendDownError, CredentialsExpiredError
from watchstep_launch.backends.ray.submission import last_message_line

SECONDS = 20.0

_INVALID_ENVIRONMENT = (
    TypeError,
    ValueError,
    NotImplementedError,
    FileNotFoundError,
    NotADirectoryError,
    PermissionError,
)
"""Errors of Ray's client for an invalid runtime environment, before it contacts the cluster."""


class RayRefusedError(Exception):
    """The Jobs API answered with an error: ``code`` is the HTTP status, ``text`` its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @property
    def reason(self) -> str:
        """The line with the reason."""
        return last_message_line(self.text) or f"HTTP {self.code}"


class RayClient:
    """The calls of the Jobs API that Watchstep uses.

    All raise `BackendDownError`, `CredentialsExpiredError`, and `RayRefusedError` for other refusals.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = self._call(_Client, address)

    def submit(self, **request: Any) -> str:
        """Submit a job and return its id. Also raises `RayRefusedError` for requests that Ray's own client rejects."""

        def checked() -> str:
            try:
                return str(self._client.submit_job(**request))
            except requests.RequestException:
                raise  # some are ValueErrors as well
            except _INVALID_ENVIRONMENT as error:
                raise RayRefusedError(400, f"{type(error).__name__}: {error}") from error

        return str(self._call(checked))

    def details(self, job_id: str) -> JobDetails | None:
        """Return a job's details; None if there is no such job."""
        try:
            details: JobDetails = self._call(self._client.get_job_info, job_id)
        except RayRefusedError as error:
            if error.code == requests.codes.not_found:
                return None
            raise
        return details

    def all(self) -> list[JobDetails]:
        """Return all jobs that the cluster remembers."""
        return list(self._call(self._client.list_jobs))

    def stop(self, job_id: str) -> None:
        """Send SIGTERM to all processes of a job, and SIGKILL after a timeout."""
        self._call(self._client.stop_job, job_id)

    def logs(self, job_id: str) -> str:
        """Return a job's whole output."""
        return str(self._call(self._client.get_job_logs, job_id))

    def _call(self, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except AuthenticationError as error:
            raise self._credentials_error(str(error)) from error
        except RayRefusedError as error:
            if error.code in (requests.codes.unauthorized, requests.codes.forbidden):
                raise self._credentials_error(error.reason) from error
            if error.code in (429, 502, 503, 504):
                raise self._down(error.reason) from error
            raise
        except (OSError, RuntimeError) as error:  # requests' own errors are OSErrors
            raise self._down(str(error)) from error

    def _down(self, reason: str) -> BackendDownError:
        return BackendDownError(
            f"Ray at {self._address} does not answer ({reason[:300]})",
            "check whether its dashboard runs, and the address",
        )

    def _credentials_error(self, reason: str) -> CredentialsExpiredError:
        return CredentialsExpiredError(
            f"Ray at {self._address} refused the request ({reason[:300]})",
            "set the token with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )


class _Client(JobSubmissionClient):  # type: ignore[misc, unused-ignore]
    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", SECONDS)
        response: requests.Response = super()._do_request(method, endpoint, **options)
        return response

    def _raise_error(self, r: requests.Response) -> NoReturn:
        raise RayRefusedError(r.status_code, r.text)
