"""Projects. Admins of all projects create them and assign their stores."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from watchstep.format.layout import check_name
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working
from watchstep_services.api.routes.stores import StoreCheck, check_output
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.auth import AuthenticatedCaller
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Project
from watchstep_services.stores.opening import check_store
from watchstep_services.tenancy import (
    ConflictError,
    allow_backends,
    backends_of,
    create_project,
    find_project,
    find_store,
    move_project,
    places_of,
)

router = APIRouter(prefix="/v1/projects", tags=["projects"])


class ProjectInput(BaseModel):
    """A project to create."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"name": "vision", "store": "team-a", "backends": []}]},
    )

    name: str = Field(max_length=128, description="1 to 128 letters, digits, '.', '_' or '-'.")
    store: str = Field(max_length=128, description="Name of a registered store.")
    prefix: str = Field(
        "", max_length=512, description="Prefix below the store; runs are stored in <prefix>/<name>/."
    )
    backends: list[str] = Field(
        default_factory=list, max_length=100, description="Registered backends that its jobs may run on."
    )
    description: str = Field("", max_length=2000)


class ProjectChange(BaseModel):
    """Changes to a project. Omitted fields remain unchanged."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{"archived": True}]}
    )

    store: str | None = Field(
        None,
        max_length=128,
        description="Name of the registered store of new runs. Earlier runs are read from the store that they were registered with.",
    )
    prefix: str | None = Field(None, max_length=512, description="Prefix below the store.")
    moves_runs: bool = Field(
        False,
        description="Earlier runs are read from the new location, too. The service does not move objects: copy them first.",
    )
    backends: list[str] | None = Field(
        None, max_length=100, description="Registered backends that its jobs may run on; replaces the list."
    )
    description: str | None = Field(None, max_length=2000)
    archived: bool | None = Field(
        None, description="Whether the project is archived; an archived project accepts no new runs."
    )


class ProjectOutput(BaseModel):
    """A project."""

    name: str
    description: str
    store: str = Field(description="Name of the store of new runs.")
    prefix: str
    location: str = Field(description="URL or folder that contains its new runs.")
    locations: list[str] = Field(description="URLs or folders that contain its runs, that of new runs first.")
    backends: list[str] = Field(description="Registered backends that its jobs may run on.")
    created_ns: int
    archived_ns: int | None


class ProjectList(PageOutput):
    """Projects by name."""

    projects: list[ProjectOutput]


@router.get("", summary="List projects")
@permits("read")
def list_projects(service: Served, caller: Caller, paging: Paged) -> ProjectList:
    """Return the projects that the token may access, by name."""
    visible = () if caller.project is None else (Project.name == caller.project,)
    with service.database.read() as session:
        rows, following = paging.fetch(session, Project, visible, ListOrder(Project.name))
        return ProjectList(projects=[_output(session, row) for row in rows], next_page_token=following)


@router.post("", summary="Create a project", status_code=201, dependencies=[Once], responses=documented(409))
@permits("administer")
def post_project(body: ProjectInput, service: Served) -> ProjectOutput:
    """Create a project on a registered store, at a location that no other project uses."""
    check_name("project", body.name)
    with service.database.write() as session:
        store = find_store(session, body.store)
        if not create_project(session, body.name, store, body.prefix, body.description):
            raise ConflictError(f"project {body.name!r}: already exists", "change it, or choose another name")
        allow_backends(session, body.name, body.backends)
        return _output(session, find_project(session, body.name))


@router.get("/{project}", summary="Get a project")
@permits("read")
def get_project(project: str, service: Served) -> ProjectOutput:
    """Return a project with the location of its runs and the backends of its jobs."""
    with service.database.read() as session:
        return _output(session, find_project(session, project))


@router.patch("/{project}", summary="Change or archive a project", responses=documented(409))
@permits("administer")
def patch_project(project: str, body: ProjectChange, service: Served, caller: Caller) -> ProjectOutput:
    """Change a project. Admins of the project may change its description only; admins of all projects, everything."""
    if {"store", "prefix", "backends", "archived"} & body.model_fields_set:
        _require_all_projects(caller)
    with service.database.write() as session:
        row = find_project(session, project)
        if body.store is not None or body.prefix is not None:
            store = row.placed.store if body.store is None else find_store(session, body.store)
            prefix = row.placed.prefix if body.prefix is None else body.prefix
            move_project(session, row, store, prefix, moves_runs=body.moves_runs)
        if body.backends is not None:
            allow_backends(session, project, body.backends)
        if body.description is not None:
            row.description = body.description
        if body.archived is not None:
            row.archived_ns = (row.archived_ns or read_clock(session)) if body.archived else None
        session.flush()
        return _output(session, row)


@router.post("/{project}/check", summary="Check a project's store")
@permits("operate")
def post_project_check(project: str, service: Served, slots: Working) -> StoreCheck:
    """Assume the store's role, then list, write, read, create and delete a test object at the location of the project's new runs."""
    with service.database.read() as session:
        place = find_project(session, project).place
    with slots.store_checks.acquire(project):
        return check_output(check_store(place.registration, place.prefix, place.project))


def _require_all_projects(caller: AuthenticatedCaller) -> None:
    """Raise an error for an admin of one project, who could otherwise point it at objects or backends of another."""
    if caller.project is not None:
        raise RequestRefusedError(
            403,
            "the token is limited to one project; stores and backends belong to all",
            "use a token of all projects",
        )


def _output(session: Session, row: Project) -> ProjectOutput:
    return ProjectOutput(
        name=row.name,
        description=row.description,
        store=row.placed.store.name,
        prefix=row.placed.prefix,
        location=row.place.location,
        locations=[placed.place.location for placed in places_of(session, row.name)],
        backends=[backend.name for backend in backends_of(session, row.name)],
        created_ns=row.created_ns,
        archived_ns=row.archived_ns,
    )
