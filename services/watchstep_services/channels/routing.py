"""The routing tree of a project: from the labels of an alert to its receivers, as in Prometheus Alertmanager.

An alert enters at the root and goes down into the first child that it matches, and on to the next where that child says
``continue``. If no child takes it, the node itself does. A setting that a node lacks is its parent's. Matchers are written
as ``severity="critical"`` or ``team=~"ml|vision"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from watchstep_rules.config.rule_config import ReceiverName
from watchstep_rules.signals import tensor_selection

Operator = Literal["=", "!=", "=~", "!~"]

MOST_CHARACTERS = 500
"""Of a matcher."""

_FORM = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"]*))\s*')
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True)
class Matcher:
    """A condition on one label. A label that an alert does not have is as one that is empty.

    Attributes:
        label: its name.
        operator: equal, not equal, matched as a whole by a regular expression in RE2's syntax, or not.
        value: what it is held against.
    """

    label: str
    operator: Operator
    value: str

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it."""
        matcher = labels.get(self.label, "")
        if self.operator in ("=", "!="):
            return (matcher == self.value) == (self.operator == "=")
        return tensor_selection.matches(rf"(?:{self.value})\z", matcher) == (self.operator == "=~")

    def __str__(self) -> str:
        escaped = self.value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{self.label}{self.operator}"{escaped}"'


def parse_matcher(text: str) -> Matcher:
    r"""Read a matcher; quotes around the value may be left out where it has no spaces.

    Within quotes ``\"`` and ``\\`` stand for a quote and a backslash; every other backslash is the expression's own.

    Raises:
        ValueError: it is none; the message says what one looks like.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a matcher of {len(text)} characters, over the limit of {MOST_CHARACTERS}")
    routes = _FORM.fullmatch(text)
    if routes is None:
        raise ValueError(
            f'{text!r} is not a matcher: write one like severity="critical" or team=~"ml|vision"'
        )
    label, operator, quoted, bare = routes.groups()
    value = bare if quoted is None else _ESCAPED.sub(r"\1", quoted)
    if operator in ("=~", "!~"):
        tensor_selection.check(value)
        tensor_selection.check(rf"(?:{value})\z")
    return Matcher(label, cast("Operator", operator), value)


ALL_LABELS = "..."
"""In ``group_by``: every alert is told by itself."""

MOST_NODES = 500
"""Of a tree."""

DEEPEST = 16
"""Levels of a tree, the root counted."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_LONGEST = 366 * 86400.0


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    parts = _DURATION.findall(value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise ValueError(f"{value!r} is not a duration: write seconds, or 30s, 5m, 1h30m, 1d")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _matcher(text: str) -> str:
    return str(parse_matcher(text))


Duration = Annotated[
    float,
    BeforeValidator(_seconds, json_schema_input_type=float | str),
    Field(ge=0, le=_LONGEST),
]
WrittenMatcher = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_matcher)]
GroupLabel = Annotated[str, Field(pattern=r"^(\.\.\.|[a-zA-Z_][a-zA-Z0-9_]{0,63})$")]

DEFAULT_GROUP_BY = ("project", "run")
DEFAULT_GROUP_WAIT = 10.0
DEFAULT_GROUP_INTERVAL = 300.0
DEFAULT_REPEAT_INTERVAL = 4 * 3600.0


class RouteNode(BaseModel):
    """A node of the tree. Durations are seconds, or text like ``30s``, ``5m``, ``4h``."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    receiver: ReceiverName | None = Field(
        None, description="Who is told; the parent's where none is named. A root without one tells nobody."
    )
    matchers: tuple[WrittenMatcher, ...] = Field(
        (), max_length=16, description='All must hold: `severity="critical"`, `team=~"ml|vision"`.'
    )
    go_on: bool = Field(
        False, alias="continue", description="Whether the next siblings are looked at after this one matched."
    )
    group_by: tuple[GroupLabel, ...] | None = Field(
        None,
        max_length=16,
        description="Alerts that agree in these labels are told together; `...` for each by itself.",
    )
    group_wait: Duration | None = Field(None, description="How long a new group gathers before it is told.")
    group_interval: Duration | None = Field(
        None, description="After it was told, how long a group waits to tell what is new in it."
    )
    repeat_interval: Annotated[Duration, Field(gt=0)] | None = Field(
        None, description="After it was told, when a group that still fires is told again."
    )
    send_resolved: bool | None = Field(None, description="Whether the end is told.")
    routes: tuple[RouteNode, ...] = Field((), max_length=MOST_NODES, description="Children, in order.")

    @model_validator(mode="after")
    def _bounded(self) -> RouteNode:
        # Children were checked before their parents, so this depth is never beyond the limit by more than one.
        count, depth = _size(self)
        if count > MOST_NODES or depth > DEEPEST:
            raise ValueError(f"a tree may have {MOST_NODES} nodes on {DEEPEST} levels, and this has more")
        return self

    def receivers(self) -> frozenset[str]:
        """All names of the tree."""
        return frozenset(node.receiver for node in _nodes(self) if node.receiver is not None)

    def as_data(self) -> dict[str, Any]:
        """JSON-ready, as it is written in a file."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class RootNode(RouteNode):
    """The root: every alert enters here, so it has no matchers."""

    @model_validator(mode="after")
    def _takes_all(self) -> RootNode:
        if self.matchers or self.go_on:
            raise ValueError("the root takes every alert: put 'matchers' and 'continue' on its 'routes'")
        return self


@dataclass(frozen=True)
class Route:
    """One receiver that an alert reaches, and how it is grouped on the way. Times are in seconds.

    Attributes:
        receiver: its name.
        group_by: labels that make a group; `ALL_LABELS` alone for each alert by itself.
        group_wait: how long a new group gathers.
        group_interval: between two notifications of a group with news.
        repeat_interval: between two without.
        send_resolved: whether the end is told.
        place: the node's way from the root, part of the group's key: two routes to one receiver are two groups.
        refresh: the receiver forgets what it is not told again: repeats go on, acknowledged or not, until the alert is
            resolved or silenced.
    """

    receiver: str
    group_by: tuple[str, ...] = DEFAULT_GROUP_BY
    group_wait: float = DEFAULT_GROUP_WAIT
    group_interval: float = DEFAULT_GROUP_INTERVAL
    repeat_interval: float = DEFAULT_REPEAT_INTERVAL
    send_resolved: bool = True
    place: str = ""
    refresh: bool = False

    def group_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """What of an alert's labels makes its group."""
        if ALL_LABELS in self.group_by:
            return dict(sorted(labels.items()))
        return {name: labels[name] for name in sorted(set(self.group_by)) if name in labels}


def routes_for(tree: RouteNode, labels: Mapping[str, str], notify: Iterable[str] = ()) -> tuple[Route, ...]:
    """Whom an alert reaches, in the tree's order.

    Args:
        tree: the project's.
        labels: the alert's, as `notification.alert_labels` makes them.
        notify: receivers that the alert's rule config names itself; those that the tree does not reach are added, grouped as
            the root says.
    """
    root = _inherit(Route(""), tree, "r")
    routes = list(_walk(tree, root, labels))
    reached = {route.receiver for route in routes}
    named = (name for name in dict.fromkeys(notify) if name not in reached)
    return (*routes, *(replace(root, receiver=name, place=f"n:{name}") for name in named))


def _walk(node: RouteNode, route: Route, labels: Mapping[str, str]) -> Iterator[Route]:
    taken = False
    for number, child in enumerate(node.routes):
        if not all(parse_matcher(text).holds(labels) for text in child.matchers):
            continue
        taken = True
        yield from _walk(child, _inherit(route, child, f"{route.place}/{number}"), labels)
        if not child.go_on:
            return
    if not taken and route.receiver:
        yield route


def _inherit(route: Route, node: RouteNode, place: str) -> Route:
    said: dict[str, Any] = {
        name: value
        for name in (
            "receiver",
            "group_by",
            "group_wait",
            "group_interval",
            "repeat_interval",
            "send_resolved",
        )
        if (value := getattr(node, name)) is not None
    }
    return replace(route, place=place, **said)


def _nodes(node: RouteNode) -> Iterator[RouteNode]:
    yield node
    for child in node.routes:
        yield from _nodes(child)


def _size(node: RouteNode) -> tuple[int, int]:
    count, depth = 1, 0
    for child in node.routes:
        below, levels = _size(child)
        count, depth = count + below, max(depth, levels)
    return count, depth + 1
