"""Receivers of a project: configuration, tests, and message previews."""

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
from watchstep_services.channels.notification import Status
from watchstep_services.channels.receiver import Receiver
from watchstep_services.channels.receiver_file import RECEIVER, AnyReceiver
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ReceiverRow
from watchstep_services.notify import directory, samples
from watchstep_services.notify.directory import (
    UnreadableReceiverError,
    find_receiver,
    known_receivers,
)
from watchstep_services.notify.flush import deliver, delivery_context, message_of
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


def _with_example(example: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [example]})


class ReceiverOutput(BaseModel):
    """A receiver. Secrets are replaced by their source, or by the fact that they are set."""

    model_config = _with_example(_SHOWN)

    name: str
    kind: str
    origin: str = Field(description="project, or owner: from the service's own file, for all projects.")
    written_by: str
    written_ns: int
    receiver: dict[str, Any] = Field(
        description="The receiver as written. A stored secret is shown as {set: true}; sending that back keeps it."
    )
    problem: str = Field(
        "", description="Reason why it delivers nothing: a later version of the service wrote it."
    )


class ReceiverList(BaseModel):
    """Receivers by name."""

    model_config = _with_example({"receivers": [_SHOWN]})

    receivers: list[ReceiverOutput]


class TestInput(BaseModel):
    """A test notification to send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Status = "firing"


class TestOutput(BaseModel):
    """Result of a test notification."""

    model_config = _with_example(
        {"result": "done", "detail": "hooks.example.com: answered 204", "notification": "test-5f2b0c9e"}
    )

    result: str = Field(description="done; error: a delivery would be retried; failed: it would not.")
    detail: str
    notification: str = Field(description="Id of the notification.")


class MessagePreviewInput(BaseModel):
    """Templates to preview, and the alert to render."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"title": "{name} on {run}", "text": "{alerts}"}]},
    )

    title: str | None = Field(None, description="Template to use instead of the receiver's.")
    text: str | None = Field(None, description="Template to use instead of the receiver's.")
    alert: str | None = Field(None, description="Template to use instead of the receiver's.")
    run: str | None = Field(None, description="Run of a recorded alert; default: an example.")
    name: str | None = Field(None, description="Rule config to render the newest alert of, on the run.")
    status: Status = Field("firing", description="Status of the example.")


class MessagePreviewOutput(BaseModel):
    """Message that a receiver would get."""

    model_config = _with_example(
        {
            "title": "[FIRING] no-nans (critical) vision/resnet50-17",
            "text": "no-nans (critical) firing: bad from step 5",
        }
    )

    title: str
    text: str


@router.get("", summary="List receivers")
@permits("operate")
def get_receivers(project: str, service: Served) -> ReceiverList:
    """Return all receivers that the project's alerts can use, including those of the service owner."""
    check_name("project", project)
    with service.database.read() as session:
        names = sorted(known_receivers(service, session, project))
        return ReceiverList(receivers=[_stored_output(service, session, project, name) for name in names])


@router.get("/{name}", summary="Get a receiver")
@permits("operate")
def get_receiver(project: str, name: str, service: Served, response: Response) -> ReceiverOutput:
    """Return a receiver without its secrets. Use the ETag for If-Match."""
    with service.database.read() as session:
        check_name("project", project)
        output = _stored_output(service, session, project, name)
    tag(response, output)
    return output


@router.put("/{name}", summary="Create or replace a receiver")
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
    """Create or replace a receiver. One that acts in AWS or reads secrets from the environment requires an admin."""
    check_name("project", project)
    if body.name != name:
        raise ConfigError(
            f"name: {body.name!r} differs from {name!r} in the address", "use the same name in both"
        )
    with service.database.write() as session:
        _require(service, session, (project, name), if_match)
        try:
            directory.put_receiver(service, session, project, body, caller)
        except (directory.ForbiddenError, directory.InUseError) as error:
            raise _refused(error) from error
        output = _output(service, session, project, find_receiver(service, session, project, name))
    tag(response, output)
    return output


@router.delete("/{name}", summary="Remove a receiver")
@permits("operate")
def delete_receiver(
    project: str, name: str, service: Served, caller: Caller, if_match: IfMatch = None
) -> ReceiverOutput:
    """Remove a receiver and its secrets. Refused while the routing tree contains it. Its pending notifications are dropped."""
    check_name("project", project)
    with service.database.write() as session:
        _require(service, session, (project, name), if_match)
        output = _stored_output(service, session, project, name)
        try:
            directory.delete_receiver(service, session, project, name, caller)
        except (directory.ForbiddenError, directory.InUseError) as error:
            raise _refused(error) from error
    return output


@router.post("/{name}/test", summary="Send a test", dependencies=[Once], responses=documented(409))
@permits("operate")
def test_receiver(project: str, name: str, body: TestInput, service: Served, slots: Working) -> TestOutput:
    """Send one notification that is marked as a test, and return its result."""
    with service.database.read() as session:
        receiver = _find(service, session, project, name)
        context = delivery_context(service, session, project, receiver)
    notification = samples.example(service, project, body.status, context.now_ns)
    with slots.receiver_tests.acquire(project):
        try:
            attempt = deliver(receiver, notification, context)
        except WatchstepError as error:
            detail = f"{error.what} ({error.hint})"
            return TestOutput(result="error", detail=detail, notification=notification.id)
    return TestOutput(result=attempt.result, detail=attempt.detail, notification=notification.id)


@router.post("/{name}/preview", summary="Preview the message of a receiver")
@permits("operate")
def preview_receiver(
    project: str, name: str, body: MessagePreviewInput, service: Served
) -> MessagePreviewOutput:
    """Render title and text with the receiver's templates, or with those of the request. Nothing is sent."""
    with service.database.read() as session:
        receiver = _with_templates(_find(service, session, project, name), body)
        at_ns = read_clock(session)
        if body.run is None or body.name is None:
            notification = samples.example(service, project, body.status, at_ns)
        else:
            run = find_run(session, project, body.run)
            notification = samples.of_alert(service, session, run, body.name, at_ns)
    message = message_of(notification, receiver.templates)
    return MessagePreviewOutput(title=message.title, text=message.text)


def _find(service: Service, session: Session, project: str, name: str) -> Receiver:
    check_name("project", project)
    return find_receiver(service, session, project, name)


def _with_templates(receiver: Receiver, body: MessagePreviewInput) -> Receiver:
    templates = {
        name: value for name in ("title", "text", "alert") if (value := getattr(body, name)) is not None
    }
    try:
        return RECEIVER.validate_python({**receiver.as_data(), **templates})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = str(first["loc"][-1])
        raise ConfigError(
            f"{field}: {first['msg'].removeprefix('Value error, ')}", "correct the template"
        ) from error


def _stored_output(service: Service, session: Session, project: str, name: str) -> ReceiverOutput:
    """Return a stored receiver, also one that this version cannot read."""
    try:
        return _output(service, session, project, find_receiver(service, session, project, name))
    except UnreadableReceiverError as error:
        row = session.get_one(ReceiverRow, (project, name))
        return ReceiverOutput(
            name=name, kind=row.kind, origin="project", written_by=row.written_by, written_ns=row.written_ns,
            receiver={}, problem=f"{error.what}: {error.hint}",
        )  # fmt: skip


def _output(service: Service, session: Session, project: str, receiver: Receiver) -> ReceiverOutput:
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


def _require(service: Service, session: Session, key: tuple[str, str], if_match: str | None) -> None:
    if if_match is None:
        return
    project, name = key
    row = session.get(ReceiverRow, key)
    require_match(if_match, None if row is None else _stored_output(service, session, project, name))


def _refused(error: WatchstepError) -> RequestRefusedError:
    return RequestRefusedError(
        403 if isinstance(error, directory.ForbiddenError) else 409, error.what, error.hint
    )
