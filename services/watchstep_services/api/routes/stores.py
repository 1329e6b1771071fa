"""Registered stores: for admins of all projects."""

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
from watchstep_services.stores.opening import TriedStep, check_store, failed
from watchstep_services.tenancy.projects import (
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
    """How a store is reached."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [_EXAMPLE]})

    url: str = Field(max_length=1024, description="A bucket's prefix, as s3://bucket/prefix; or a folder.")
    role_arn: str = Field(
        "", max_length=600, description="AWS role by which it is reached; else the service's own."
    )
    external_id: str = Field("", max_length=1224, description="Shown when the role is taken.")
    region: str = Field("", max_length=64, description="Of the bucket.")
    endpoint: str = Field("", max_length=300, description="Of a service that speaks S3.")
    check: bool = Field(True, description="Try it first, and refuse it where something cannot be done.")

    @property
    def registration(self) -> StoreRegistration:
        """As it is kept."""
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
    version: int = Field(description="Goes up with every change; all processes use the newest.")
    created_ns: int
    updated_ns: int


class StoreList(PageOutput):
    """Stores by name."""

    stores: list[StoreOutput]


class CheckStep(BaseModel):
    """One thing that was tried."""

    name: str = Field(description="role, list, write, read, create_once or delete.")
    ok: bool
    detail: str = Field(description="What is wrong.")
    hint: str = Field(description="What to do about it.")


class StoreCheck(BaseModel):
    """What was tried, in order; what follows from a step that failed was not."""

    ok: bool
    steps: list[CheckStep]


@router.get("", summary="List stores")
@permits("administer")
def list_stores(service: Served, paging: Paged) -> StoreList:
    """All of them, by name."""
    with service.database.read() as session:
        rows, following = paging.fetch(session, StoreRow, (), ListOrder(StoreRow.name))
        return StoreList(stores=[_shown(row) for row in rows], next_page_token=following)


@router.post("", summary="Register a store", status_code=201, dependencies=[Once], responses=documented(409))
@permits("administer")
def post_store(body: StoreInput, service: Served, slots: Working) -> StoreOutput:
    """Projects can be put on it then."""
    registration = _tried(service, slots, body)
    with service.database.write() as session:
        return _shown(register_store(session, body.name, registration))


@router.get("/{store}", summary="Look at a store")
@permits("administer")
def get_store(store: str, service: Served) -> StoreOutput:
    """How it is reached."""
    with service.database.read() as session:
        return _shown(find_store(session, store))


@router.put("/{store}", summary="Change a store", responses=documented(409))
@permits("administer")
def put_store(store: str, body: StoreChange, service: Served, slots: Working) -> StoreOutput:
    """All processes reach it so from their next piece of work on."""
    with service.database.read() as session:
        find_store(session, store)
    registration = _tried(service, slots, body)
    with service.database.write() as session:
        return _shown(change_store(session, store, registration))


@router.delete("/{store}", summary="Forget a store", status_code=204, responses=documented(409))
@permits("administer")
def delete_store(store: str, service: Served) -> None:
    """Nothing on it is touched. Refused while projects use it."""
    with service.database.write() as session:
        remove_store(session, store)


@router.post("/{store}/check", summary="Try a store")
@permits("administer")
def post_store_check(store: str, service: Served, slots: Working) -> StoreCheck:
    """Take its role, list, write, read, create and delete an object of its own."""
    with service.database.read() as session:
        registration = find_store(session, store).registration
    with slots.store_checks.taken(""):
        return check_output(check_store(registration))


def check_output(steps: list[TriedStep]) -> StoreCheck:
    """What was tried, as the API shows it."""
    shown = [CheckStep(name=step.name, ok=step.ok, detail=step.detail, hint=step.hint) for step in steps]
    return StoreCheck(ok=failed(steps) is None, steps=shown)


def _tried(service: Service, slots: WorkSlots, body: StoreChange) -> StoreRegistration:
    registration = checked(body.registration, service.settings.local_stores)
    if not body.check:
        return registration
    with slots.store_checks.taken(""):
        problem = failed(check_store(registration))
    if problem is not None:
        raise ConfigError(
            f"{problem.name}: {problem.detail}", f"{problem.hint}; or register it with check: false"
        )
    return registration


def _shown(row: StoreRow) -> StoreOutput:
    return StoreOutput.model_validate(row, from_attributes=True)
