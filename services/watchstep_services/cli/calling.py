"""Requests of commands to a service."""

from __future__ import annotations

import os
from typing import Any

import httpx

from watchstep.errors import NotFoundError, ServiceError
from watchstep_services.cli.serve import settings_for
from watchstep_services.scheduler.embedded import read_service_file

_SECONDS = 10.0


def service_of(store: str, service: str) -> tuple[str, str]:
    """URL and token: of a named service with WATCHSTEP_TOKEN, or of the one that runs for a store on this machine.

    Raises:
        ServiceError: none runs there.
    """
    token = os.environ.get("WATCHSTEP_TOKEN", "")
    if service:
        return service.rstrip("/"), token
    home = settings_for(store, None).home_folder
    note = read_service_file(home)
    if note is None:
        raise ServiceError(
            f"no service runs for {store}",
            "start 'watchstep serve' on it, or give --service and WATCHSTEP_TOKEN",
        )
    return note["url"], token or note["operator_token"]


def call(method: str, url: str, token: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request to a service; its answer.

    Raises:
        NotFoundError: there is nothing of that name.
        ServiceError: it does not answer, or refuses.
    """
    try:
        answer = httpx.request(
            method, url, headers={"Authorization": f"Bearer {token}"}, json=body, timeout=_SECONDS
        )
    except httpx.HTTPError as error:
        raise ServiceError(f"{url}: {error}", "see that the service runs, and its URL") from error
    if answer.is_success:
        data: dict[str, Any] = answer.json()
        return data
    try:
        problem = answer.json()
        what, mend = str(problem["detail"]), str(problem["mend"])
    except (ValueError, KeyError):
        what, mend = (
            f"{url}: answered {answer.status_code}",
            "see that the URL is that of a Watchstep service",
        )
    raise (
        NotFoundError(what, mend) if answer.status_code == httpx.codes.NOT_FOUND else ServiceError(what, mend)
    )
