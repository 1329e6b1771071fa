"""Receivers of a project: who can be told, how, and whether it works."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.channels.kinds import RECEIVER, AnyReceiver
from watchstep_services.channels.notification import Status
from watchstep_services.channels.receiver import Receiver
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ReceiverRow
from watchstep_services.notify import directory, samples
from watchstep_services.notify.directory import (
    UnreadableReceiverError,
    find_receiver,
    known_receivers,
)
from watchstep_services.notify.flush import deliver, message_of, outside_of
from watchstep_services.service.context import Service

router = APIRouter(prefix="/v1/projects/{project}/receivers", tags=["receivers"])


_WRITTEN: dict[str, Any] = {
    "name": "ml-oncall",
    "kind": "webhook",
    "url": "https://hooks.example.com/watchstep",
    "secret": {"set": True},
}
_SHOWN: dict[str, Any] = {
    "name": "ml-oncall",
    "kind": "webhook",
    "origin": "project",
    "written_by": "ann (operator, token 3f9c)",
    "written_ns": 1_795_212_000_000_000_000,
    "receiver": _WRITTEN,
    "problem": "",
}


def _with_example(shown: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [shown]})


class ReceiverOutput(BaseModel):
    """A receiver. Of a secret it says where it lies, or that it is set."""

    model_config = _with_example(_SHOWN)

    name: str
    kind: str
    origin: str = Field(description="project, or owner: of the service's own file, for all projects.")
    written_by: str
    written_ns: int
    receiver: dict[str, Any] = Field(
        description="As it is written; a secret that is kept shows as {set: true}, and stays where it is sent back so."
    )
    problem: str = Field("", description="Why nobody is told by it: a later version of the service wrote it.")


class ReceiverList(BaseModel):
    """Receivers by name."""

    model_config = _with_example({"receivers": [_SHOWN]})

    receivers: list[ReceiverOutput]


class TestInput(BaseModel):
    """A test to send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Status = "firing"


class TestOutput(BaseModel):
    """What came of a test."""

    model_config = _with_example(
        {"result": "done", "detail": "hooks.example.com: answered 204", "notification": "test-5f2b0c9e"}
    )

    result: str = Field(description="done; error: it would be tried again; failed: it would not.")
    detail: str
    notification: str = Field(description="Its id.")


class MessagePreviewInput(BaseModel):
    """Templates to look at, and an alert to fill them with."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"title": "{name} on {run}", "text": "{alerts}"}]},
    )

    title: str | None = Field(None, description="Instead of the receiver's own.")
    text: str | None = Field(None, description="Instead of the receiver's own.")
    alert: str | None = Field(None, description="Instead of the receiver's own.")
    run: str | None = Field(None, description="Run of a real alert; an example where none is named.")
    name: str | None = Field(None, description="Of the rule config whose newest alert on the run it is.")
    status: Status = Field("firing", description="Of the example.")


class MessagePreviewOutput(BaseModel):
    """What a receiver would be told."""

    model_config = _with_example(
        {
            "title": "[FIRING] no-nans (critical) vision/resnet50-17",
            "text": "no-nans (critical) firing at step 5",
        }
    )

    title: str
    text: str


@router.get("", summary="List receivers")
@permits("operate")
def get_receivers(project: str, service: Served) -> ReceiverList:
    """All receivers that the project's alerts can reach, those of the service's owner as well."""
    check_name("project", project)
    with service.database.read() as session:
        names = sorted(known_receivers(service, session, project))
        return ReceiverList(receivers=[_stored(service, session, project, name) for name in names])


@router.get("/{name}", summary="Look at a receiver")
@permits("operate")
def get_receiver(project: str, name: str, service: Served, response: Response) -> ReceiverOutput:
    """A receiver without its secrets; its ETag is for If-Match."""
    with service.database.read() as session:
        check_name("project", project)
        shown = _stored(service, session, project, name)
    tag(response, shown)
    return shown


@router.put("/{name}", summary="Write a receiver")
@permits("operate")
def put_receiver(
    project: str,
    name: str,
    body: Annotated[AnyReceiver, Body(examples=[_WRITTEN])],
    service: Served,
    caller: Caller,
    response: Response,
    if_match: IfMatch = None,
) -> ReceiverOutput:
    """Make a receiver, or replace it. One that acts in AWS, or takes secrets from the environment, only an admin may write."""
    check_name("project", project)
    if body.name != name:
        raise ConfigError(f"name: {body.name!r} is not the {name!r} of the address", "name it the same twice")
    with service.database.write() as session:
        _require(service, session, (project, name), if_match)
        try:
            directory.put_receiver(service, session, project, body, caller)
        except (directory.ForbiddenError, directory.InUseError) as error:
            raise _refused(error) from error
        shown = _shown(service, session, project, find_receiver(service, session, project, name))
    tag(response, shown)
    return shown


@router.delete("/{name}", summary="Remove a receiver")
@permits("operate")
def delete_receiver(
    project: str, name: str, service: Served, caller: Caller, if_match: IfMatch = None
) -> ReceiverOutput:
    """Remove a receiver and its secrets; not while the routing tree names it. What was to be sent to it is given up."""
    check_name("project", project)
    with service.database.write() as session:
        _require(service, session, (project, name), if_match)
        shown = _stored(service, session, project, name)
        try:
            directory.delete_receiver(service, session, project, name, caller)
        except (directory.ForbiddenError, directory.InUseError) as error:
            raise _refused(error) from error
    return shown


@router.post("/{name}/test", summary="Send a test", dependencies=[Once], responses=documented(409))
@permits("operate")
def test_receiver(project: str, name: str, body: TestInput, service: Served, slots: Working) -> TestOutput:
    """Send a message that says that it is a test, once, and say what came of it."""
    with service.database.read() as session:
        receiver = _found(service, session, project, name)
        outside = outside_of(service, session, project, receiver)
    notification = samples.example(service, project, body.status, outside.now_ns)
    with slots.receiver_tests.taken(project):
        try:
            tried = deliver(receiver, notification, outside)
        except WatchstepError as error:
            detail = f"{error.what} ({error.hint})"
            return TestOutput(result="error", detail=detail, notification=notification.id)
    return TestOutput(result=tried.result, detail=tried.detail, notification=notification.id)


@router.post("/{name}/preview", summary="Look at what a receiver would be told")
@permits("operate")
def preview_receiver(
    project: str, name: str, body: MessagePreviewInput, service: Served
) -> MessagePreviewOutput:
    """Title and text by the receiver's templates, or by others that are tried; nothing is sent."""
    with service.database.read() as session:
        receiver = _with_templates(_found(service, session, project, name), body)
        at_ns = read_clock(session)
        if body.run is None or body.name is None:
            notification = samples.example(service, project, body.status, at_ns)
        else:
            run = find_run(session, project, body.run)
            notification = samples.of_alert(service, session, run, body.name, at_ns)
    letter = message_of(notification, receiver.templates)
    return MessagePreviewOutput(title=letter.title, text=letter.text)


def _found(service: Service, session: Session, project: str, name: str) -> Receiver:
    check_name("project", project)
    return find_receiver(service, session, project, name)


def _with_templates(receiver: Receiver, body: MessagePreviewInput) -> Receiver:
    tried = {name: value for name in ("title", "text", "alert") if (value := getattr(body, name)) is not None}
    try:
        return RECEIVER.validate_python({**receiver.as_data(), **tried})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = str(first["loc"][-1])
        raise ConfigError(
            f"{place}: {first['msg'].removeprefix('Value error, ')}", "correct the template"
        ) from error


def _stored(service: Service, session: Session, project: str, name: str) -> ReceiverOutput:
    """A receiver as it is kept, one that cannot be read as well."""
    try:
        return _shown(service, session, project, find_receiver(service, session, project, name))
    except UnreadableReceiverError as error:
        row = session.get_one(ReceiverRow, (project, name))
        return ReceiverOutput(
            name=name, kind=row.kind, origin="project", written_by=row.written_by, written_ns=row.written_ns,
            receiver={}, problem=f"{error.what}: {error.hint}",
        )  # fmt: skip


def _shown(service: Service, session: Session, project: str, receiver: Receiver) -> ReceiverOutput:
    data = receiver.as_data()
    if receiver.name in service.receiver_file.names:
        return ReceiverOutput(
            name=receiver.name, kind=data["kind"], origin="owner", written_by="", written_ns=0, receiver=data
        )
    row = session.get_one(ReceiverRow, (project, receiver.name))
    return ReceiverOutput(
        name=row.name,
        kind=row.kind,
        origin="project",
        written_by=row.written_by,
        written_ns=row.written_ns,
        receiver=data,
    )


def _require(service: Service, session: Session, named: tuple[str, str], if_match: str | None) -> None:
    if if_match is None:
        return
    project, name = named
    row = session.get(ReceiverRow, (project, name))
    require_match(if_match, None if row is None else _stored(service, session, project, name))


def _refused(error: WatchstepError) -> RequestRefusedError:
    return RequestRefusedError(
        403 if isinstance(error, directory.ForbiddenError) else 409, error.what, error.hint
    )
