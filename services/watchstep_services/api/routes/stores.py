"""Registered stores, for admins of all projects."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from watchstep.errors import ConfigError
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working, WorkSlots
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.models import StoreRow
from watchstep_services.service.context import Service
from watchstep_services.stores.opening import CheckedStep, check_store, failed
from watchstep_services.tenancy import (
    change_store,
    checked,
    find_store,
    register_store,
    remove_store,
)

router = APIRouter(prefix="/v1/stores", tags=["stores"])
_EXAMPLE: dict[str, Any] = {
    "url": "s3://acme-training/runs",
    "role_arn": "arn:aws:iam::123456789012:role/watchstep",
    "external_id": "acme-7f3a",
    "region": "eu-central-1",
}


class StoreChange(BaseModel):
    """Location and access of a store."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [_EXAMPLE]})

    url: str = Field(max_length=1024, description="Prefix in a bucket, as s3://bucket/prefix; or a folder.")
    role_arn: str = Field("", max_length=600, description="AWS role to assume; empty: the service's own.")
    external_id: str = Field("", max_length=1224, description="External id for assuming the role.")
    region: str = Field("", max_length=64, description="Region of the bucket.")
    endpoint: str = Field("", max_length=300, description="Endpoint of an S3-compatible service.")
    check: bool = Field(True, description="Check the store first, and refuse it if a step fails.")

    @property
    def registration(self) -> StoreRegistration:
        """The registration as the database stores it."""
        return StoreRegistration(self.url, self.role_arn, self.external_id, self.region, self.endpoint)


class StoreInput(StoreChange):
    """A store to register."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{"name": "team-a", **_EXAMPLE}]}
    )

    name: str = Field(max_length=128, description="1 to 128 letters, digits, '.', '_' or '-'.")


class StoreOutput(BaseModel):
    """A registered store."""

    name: str
    url: str
    role_arn: str
    external_id: str
    region: str
    endpoint: str
    version: int = Field(description="Version, incremented by every change; all processes use the newest.")
    created_ns: int
    updated_ns: int


class StoreList(PageOutput):
    """Stores by name."""

    stores: list[StoreOutput]


class CheckStep(BaseModel):
    """Result of one step of a check."""

    name: str = Field(description="role, list, write, read, create_once or delete.")
    ok: bool
    detail: str = Field(description="Problem; empty if the step succeeded.")
    hint: str = Field(description="How to fix the problem.")


class StoreCheck(BaseModel):
    """Result of a check: the steps in order. Steps that depend on a failed step are not run."""

    ok: bool
    steps: list[CheckStep]


@router.get("", summary="List stores")
@permits("administer")
def list_stores(service: Served, paging: Paged) -> StoreList:
    """Return all stores, by name."""
    with service.database.read() as session:
        rows, following = paging.fetch(session, StoreRow, (), ListOrder(StoreRow.name))
        return StoreList(stores=[_output(row) for row in rows], next_page_token=following)


@router.post("", summary="Register a store", status_code=201, dependencies=[Once], responses=documented(409))
@permits("administer")
def post_store(body: StoreInput, service: Served, slots: Working) -> StoreOutput:
    """Register a store, so that projects can use it."""
    registration = _checked_registration(service, slots, body)
    with service.database.write() as session:
        return _output(register_store(session, body.name, registration))


@router.get("/{store}", summary="Get a store")
@permits("administer")
def get_store(store: str, service: Served) -> StoreOutput:
    """Return the location and access of a store."""
    with service.database.read() as session:
        return _output(find_store(session, store))


@router.put("/{store}", summary="Change a store", responses=documented(409))
@permits("administer")
def put_store(store: str, body: StoreChange, service: Served, slots: Working) -> StoreOutput:
    """Replace the location and access of a store. All processes use them from their next task on."""
    with service.database.read() as session:
        find_store(session, store)
    registration = _checked_registration(service, slots, body)
    with service.database.write() as session:
        return _output(change_store(session, store, registration))


@router.delete("/{store}", summary="Delete a store", status_code=204, responses=documented(409))
@permits("administer")
def delete_store(store: str, service: Served) -> None:
    """Delete the registration of a store. Its objects remain. Refused while projects use the store."""
    with service.database.write() as session:
        remove_store(session, store)


@router.post("/{store}/check", summary="Check a store")
@permits("administer")
def post_store_check(store: str, service: Served, slots: Working) -> StoreCheck:
    """Assume the store's role, then list, write, read, create and delete a test object."""
    with service.database.read() as session:
        registration = find_store(session, store).registration
    with slots.store_checks.acquire(""):
        return check_output(check_store(registration))


def check_output(steps: list[CheckedStep]) -> StoreCheck:
    """Return the response for a check."""
    outputs = [CheckStep(name=step.name, ok=step.ok, detail=step.detail, hint=step.hint) for step in steps]
    return StoreCheck(ok=failed(steps) is None, steps=outputs)


def _checked_registration(service: Service, slots: WorkSlots, body: StoreChange) -> StoreRegistration:
    registration = checked(body.registration, service.settings.local_stores)
    if not body.check:
        return registration
    with slots.store_checks.acquire(""):
        problem = failed(check_store(registration))
    if problem is not None:
        raise ConfigError(
            f"{problem.name}: {problem.detail}", f"{problem.hint}; or register it with check: false"
        )
    return registration


def _output(row: StoreRow) -> StoreOutput:
    return StoreOutput.model_validate(row, from_attributes=True)
