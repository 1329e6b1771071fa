"""Capture document of a project: what its runs record unless the program or its launch sets it."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, ConfigDict, Field

from watchstep.capture.document.document import config_of
from watchstep.errors import ConfigError
from watchstep.format.layout import check_name
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.api.schemas.problems import documented
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.models import ProjectCapture
from watchstep_services.runs.registration import ensure_project

router = APIRouter(prefix="/v1/projects/{project}/capture", tags=["projects"])

_MAX_BYTES = 16 * 1024
"""Limit of a document: it travels in the environment of jobs, for which some backends accept 30 KiB in all."""

_EXAMPLE: dict[str, Any] = {
    "collections": {"activations": None, "encoder": {"include": "encoder[.]", "tensors": {"every": 100}}}
}

CaptureBody = Annotated[
    dict[str, Any], Body(description="A capture document, as in a capture file.", examples=[_EXAMPLE])
]


class CaptureOutput(BaseModel):
    """The capture document of a project."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"document": _EXAMPLE, "changed_by": "operator, token 3fa9c1", "changed_ns": 1}]
        }
    )

    document: dict[str, Any] | None = Field(
        description="As in a capture file; null: none, so that runs record with the built-in configuration."
    )
    changed_by: str = Field(description="Who wrote it; empty: nobody.")
    changed_ns: int = Field(description="When, in nanoseconds since the epoch; 0: never.")


@router.get("", summary="Get the capture document")
@permits("read")
def get_capture(project: str, service: Served, response: Response) -> CaptureOutput:
    """Return the project's capture document. Use the ETag for If-Match."""
    check_name("project", project)
    with service.database.read() as session:
        output = _output(session.get(ProjectCapture, project))
    tag(response, output)
    return output


@router.put("", summary="Set the capture document", responses=documented(409, 412))
@permits("operate")
def put_capture(
    project: str,
    body: CaptureBody,
    service: Served,
    caller: Caller,
    response: Response,
    if_match: IfMatch = None,
) -> CaptureOutput:
    """Replace the project's capture document. It applies to launches from now on whose program and launcher set no configuration."""
    check_name("project", project)
    size = len(json.dumps(body))
    if size > _MAX_BYTES:
        raise ConfigError(
            f"capture document: {size} bytes, more than the limit of {_MAX_BYTES}", "use fewer collections"
        )
    config_of(body, "capture document")
    with service.database.write() as session:
        ensure_project(session, service, project)
        row = session.get(ProjectCapture, project, with_for_update=True)
        require_match(if_match, _output(row))
        values = {"document": body, "changed_ns": read_clock(session), "changed_by": caller.who[:256]}
        if not insert_missing(session, ProjectCapture, {"project": project, **values}):
            row = session.get_one(ProjectCapture, project)
            for name, value in values.items():
                setattr(row, name, value)
        session.flush()
        output = _output(session.get(ProjectCapture, project))
    tag(response, output)
    return output


@router.delete("", summary="Remove the capture document", responses=documented(412))
@permits("operate")
def delete_capture(project: str, service: Served, if_match: IfMatch = None) -> CaptureOutput:
    """Delete the project's capture document, so that later launches record with the built-in configuration."""
    check_name("project", project)
    with service.database.write() as session:
        row = session.get(ProjectCapture, project, with_for_update=True)
        require_match(if_match, _output(row))
        if row is not None:
            session.delete(row)
    return _output(None)


def _output(row: ProjectCapture | None) -> CaptureOutput:
    if row is None:
        return CaptureOutput(document=None, changed_by="", changed_ns=0)
    return CaptureOutput(document=row.document, changed_by=row.changed_by, changed_ns=row.changed_ns)
