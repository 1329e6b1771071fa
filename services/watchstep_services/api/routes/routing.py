"""Routing tree of a project, which selects the receivers of its alerts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep.format.layout import check_name
from watchstep_rules.config.rule_config import LabelName, ReceiverName
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.channels.routing import RootNode
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RoutingTree
from watchstep_services.notify import directory, samples
from watchstep_services.notify.directory import known_receivers, routes_of, tree_of
from watchstep_services.service.context import Service

router = APIRouter(prefix="/v1/projects/{project}/routing", tags=["receivers"])

_EXAMPLE: dict[str, Any] = {"labels": {"severity": "critical", "rule": "nan_or_inf", "team": "vision"}}


_TREE: dict[str, Any] = {
    "receiver": "ml-oncall",
    "routes": [{"receiver": "pager", "matchers": ['severity="critical"'], "continue": True}],
}
_REACHED: dict[str, Any] = {
    "receiver": "pager",
    "group_labels": {"project": "vision", "run": "resnet50-17"},
    "group_wait": 10.0,
    "group_interval": 300.0,
    "repeat_interval": 14400.0,
    "send_resolved": True,
}


class RoutingOutput(BaseModel):
    """The tree that counts."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"origin": "project", "route": _TREE}]})

    origin: str = Field(description="project, or owner: of the service's own file.")
    route: RootNode


class RoutePreviewInput(BaseModel):
    """An alert to route: by its labels, or one that there was."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [_EXAMPLE]})

    labels: dict[LabelName, Annotated[str, Field(max_length=256)]] = Field(
        default_factory=dict, max_length=64
    )
    notify: list[ReceiverName] = Field(
        default_factory=list, max_length=16, description="Receivers that the rule config names itself."
    )
    run: str | None = Field(None, description="Run of a real alert; its labels count.")
    name: str | None = Field(None, description="Of the rule config whose newest alert on the run it is.")
    route: RootNode | None = Field(None, description="A tree to try instead of the one that counts.")


class RouteOutput(BaseModel):
    """A receiver that is reached, and how alerts are grouped on the way. Times are in seconds."""

    receiver: str
    group_labels: dict[str, str] = Field(description="What tells this alert's group from others.")
    group_wait: float
    group_interval: float
    repeat_interval: float
    send_resolved: bool


class RoutePreviewOutput(BaseModel):
    """Whom an alert reaches, in order; nobody where it is empty, as for a note of severity info."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_EXAMPLE, "routes": [_REACHED], "unknown": []}]}
    )

    labels: dict[str, str]
    routes: list[RouteOutput]
    unknown: list[str] = Field(
        description="Receivers that the rule config names and the project does not have."
    )


@router.get("", summary="Get the routing tree")
@permits("read")
def get_routing(project: str, service: Served, response: Response) -> RoutingOutput:
    """Return the project's tree, or the service owner's if the project has none. Use the ETag for If-Match."""
    check_name("project", project)
    with service.database.read() as session:
        shown = _shown(service, session, project)
    tag(response, shown)
    return shown


@router.put("", summary="Replace the routing tree")
@permits("operate")
def put_routing(
    project: str,
    body: Annotated[RootNode, Body(examples=[_TREE])],
    service: Served,
    caller: Caller,
    response: Response,
    if_match: IfMatch = None,
) -> RoutingOutput:
    """Replace the project's tree. For firing alerts it applies from their next change on."""
    check_name("project", project)
    with service.database.write() as session:
        require_match(if_match, _shown(service, session, project))
        directory.put_tree(service, session, project, body, caller)
        shown = _shown(service, session, project)
    tag(response, shown)
    return shown


@router.delete("", summary="Remove the routing tree")
@permits("operate")
def delete_routing(project: str, service: Served, if_match: IfMatch = None) -> RoutingOutput:
    """Delete the project's tree, so that the service owner's applies again, and return the latter."""
    check_name("project", project)
    with service.database.write() as session:
        require_match(if_match, _shown(service, session, project))
        directory.delete_tree(session, project)
        return _shown(service, session, project)


@router.post("/preview", summary="Preview the receivers of an alert")
@permits("read")
def preview_routing(project: str, body: RoutePreviewInput, service: Served) -> RoutePreviewOutput:
    """Route an alert without notifying anybody."""
    check_name("project", project)
    if (body.run is None) != (body.name is None):
        raise ConfigError("a real alert needs both 'run' and 'name'", "give both, or labels instead")
    with service.database.read() as session:
        labels, notify = {"project": project, **body.labels}, tuple(body.notify)
        if body.run is not None and body.name is not None:
            run = find_run(session, project, body.run)
            notification = samples.of_alert(service, session, run, body.name, read_clock(session))
            labels = dict(notification.alerts[0].labels)
            notify += samples.named_receivers(session, run, body.name)
        is_note = labels.get("severity") == "info"
        matching = () if is_note else routes_of(service, session, project, labels, notify, body.route)
        receivers = known_receivers(service, session, project)
    routes = [
        RouteOutput(
            receiver=route.receiver,
            group_labels=route.group_labels(labels),
            group_wait=route.group_wait,
            group_interval=route.group_interval,
            repeat_interval=route.repeat_interval,
            send_resolved=route.send_resolved,
        )
        for route in matching
    ]
    return RoutePreviewOutput(
        labels=labels,
        routes=routes,
        unknown=[name for name in dict.fromkeys(notify) if name not in receivers],
    )


def _shown(service: Service, session: Session, project: str) -> RoutingOutput:
    own = session.get(RoutingTree, project) is not None
    return RoutingOutput(origin="project" if own else "owner", route=tree_of(service, session, project))
