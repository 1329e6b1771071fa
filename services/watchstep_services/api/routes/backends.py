"""Registered backends, for admins of all projects."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.db.models import BackendRow
from watchstep_services.tenancy import (
    change_backend,
    find_backend,
    register_backend,
    remove_backend,
)

router = APIRouter(prefix="/v1/backends", tags=["backends"])


class BackendChange(BaseModel):
    """Settings of a backend."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of its kind; empty for a local backend."
    )


class BackendInput(BackendChange):
    """A backend to register."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{"name": "local", "kind": "local"}]}
    )

    name: str = Field(max_length=32, description="1 to 32 of a-z, 0-9, '_' and '-'.")
    kind: str = Field(max_length=32, description="Kind of the backend, for example local.")


class BackendOutput(BaseModel):
    """A registered backend."""

    name: str
    kind: str
    settings: dict[str, Any]
    version: int
    created_ns: int
    updated_ns: int


class BackendList(PageOutput):
    """Backends by name."""

    backends: list[BackendOutput]


@router.get("", summary="List backends")
@permits("administer")
def list_backends(service: Served, paging: Paged) -> BackendList:
    """Return all backends, by name."""
    with service.database.read() as session:
        rows, following = paging.fetch(session, BackendRow, (), ListOrder(BackendRow.name))
        return BackendList(backends=[_output(row) for row in rows], next_page_token=following)


@router.post(
    "", summary="Register a backend", status_code=201, dependencies=[Once], responses=documented(409)
)
@permits("administer")
def post_backend(body: BackendInput, service: Served) -> BackendOutput:
    """Register a backend. No project may use it until its backends are changed."""
    with service.database.write() as session:
        return _output(register_backend(session, body.name, body.kind, body.settings))


@router.get("/{backend}", summary="Get a backend")
@permits("administer")
def get_backend(backend: str, service: Served) -> BackendOutput:
    """Return the kind and settings of a backend."""
    with service.database.read() as session:
        return _output(find_backend(session, backend))


@router.put("/{backend}", summary="Change a backend")
@permits("administer")
def put_backend(backend: str, body: BackendChange, service: Served) -> BackendOutput:
    """Replace the settings of a backend. Its kind cannot change."""
    with service.database.write() as session:
        return _output(change_backend(session, backend, body.settings))


@router.delete("/{backend}", summary="Delete a backend", status_code=204, responses=documented(409))
@permits("administer")
def delete_backend(backend: str, service: Served) -> None:
    """Delete a backend. Refused while jobs on it may still run."""
    with service.database.write() as session:
        remove_backend(session, backend)


def _output(row: BackendRow) -> BackendOutput:
    return BackendOutput.model_validate(row, from_attributes=True)
