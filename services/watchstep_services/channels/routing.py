"""The routing tree of a project: from the labels of an alert to its receivers, as in Prometheus Alertmanager.

An alert enters at the root and descends into the first child that it matches, and into further ones if that child has
``continue``. If no child matches, the node itself takes the alert. A node inherits missing settings from its parent. Matchers are
written as ``severity="critical"`` or ``team=~"ml|vision"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from watchstep_rules.config.rule_config import ReceiverName
from watchstep_rules.signals import tensor_selection

Operator = Literal["=", "!=", "=~", "!~"]

MOST_CHARACTERS = 500
"""Limit of characters of a matcher."""

_FORM = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"]*))\s*')
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True)
class Matcher:
    """A condition on one label. A missing label counts as empty.

    Attributes:
        label: name of the label.
        operator: equal, not equal, or matched or not matched as a whole by a regular expression in RE2's syntax.
        value: value or expression to compare with.
    """

    label: str
    operator: Operator
    value: str

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels match it."""
        value = labels.get(self.label, "")
        if self.operator in ("=", "!="):
            return (value == self.value) == (self.operator == "=")
        return tensor_selection.matches(rf"(?:{self.value})\z", value) == (self.operator == "=~")

    def __str__(self) -> str:
        escaped = self.value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{self.label}{self.operator}"{escaped}"'


def parse_matcher(text: str) -> Matcher:
    r"""Parse a matcher; quotes around a value without spaces may be omitted.

    Within quotes ``\"`` and ``\\`` are a quote and a backslash; every other backslash belongs to the expression.

    Raises:
        ValueError: it is not a matcher; the message shows an example.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a matcher of {len(text)} characters; the limit is {MOST_CHARACTERS}")
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f'{text!r} is not a matcher: write one like severity="critical" or team=~"ml|vision"'
        )
    label, operator, quoted, bare = match.groups()
    value = bare if quoted is None else _ESCAPED.sub(r"\1", quoted)
    if operator in ("=~", "!~"):
        tensor_selection.check(value)
        tensor_selection.check(rf"(?:{value})\z")
    return Matcher(label, cast("Operator", operator), value)


ALL_LABELS = "..."
"""In ``group_by``: every alert is a group of its own."""

MOST_NODES = 500
"""Limit of nodes of a tree."""

DEEPEST = 16
"""Limit of levels of a tree, including the root."""

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


def _duration_schema(**bounds: float) -> WithJsonSchema:
    # `ge` and `le` of a field whose schema is a union are no keywords of JSON Schema.
    number = {"type": "number", **bounds, "maximum": _LONGEST}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "examples": ["30s", "1h30m"]}]})


Duration = Annotated[
    float, BeforeValidator(_seconds), Field(ge=0, le=_LONGEST), _duration_schema(minimum=0.0)
]
PositiveDuration = Annotated[
    float, BeforeValidator(_seconds), Field(gt=0, le=_LONGEST), _duration_schema(exclusiveMinimum=0.0)
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
        None,
        description="Receiver to notify; the parent's by default. A root without one notifies no receiver.",
    )
    matchers: tuple[WrittenMatcher, ...] = Field(
        (), max_length=16, description='All must match: `severity="critical"`, `team=~"ml|vision"`.'
    )
    continues: bool = Field(
        False,
        alias="continue",
        description="Whether later siblings are also considered after this node matched.",
    )
    group_by: tuple[GroupLabel, ...] | None = Field(
        None,
        max_length=16,
        description="Alerts with equal values of these labels share a notification; `...` for one each.",
    )
    group_wait: Duration | None = Field(
        None, description="Time for which a new group collects alerts before its first notification."
    )
    group_interval: Duration | None = Field(
        None, description="Time after a notification before changes of the group are notified."
    )
    repeat_interval: PositiveDuration | None = Field(
        None, description="Time after a notification before a group that still fires is notified again."
    )
    send_resolved: bool | None = Field(None, description="Whether resolved alerts are notified.")
    routes: tuple[RouteNode, ...] = Field((), max_length=MOST_NODES, description="Children, in order.")

    @model_validator(mode="after")
    def _bounded(self) -> RouteNode:
        # Children were validated first, so the depth exceeds the limit by at most one.
        count, depth = _size(self)
        if count > MOST_NODES or depth > DEEPEST:
            raise ValueError(f"the tree exceeds the limit of {MOST_NODES} nodes or {DEEPEST} levels")
        return self

    def receivers(self) -> frozenset[str]:
        """All receivers that the tree names."""
        return frozenset(node.receiver for node in _nodes(self) if node.receiver is not None)

    def as_data(self) -> dict[str, Any]:
        """Convert to JSON-ready data in the form of the file."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class RootNode(RouteNode):
    """The root node. It has no matchers, because every alert enters here."""

    @model_validator(mode="after")
    def _has_no_matchers(self) -> RootNode:
        if self.matchers or self.continues:
            raise ValueError("the root takes every alert: put 'matchers' and 'continue' on its 'routes'")
        return self


@dataclass(frozen=True)
class Route:
    """One receiver of an alert, and how the alert is grouped. Times are in seconds.

    Attributes:
        receiver: name of the receiver.
        group_by: labels that form a group; `ALL_LABELS` for one group per alert.
        group_wait: time for which a new group collects alerts.
        group_interval: time between two notifications of a group with changes.
        repeat_interval: time between two without changes.
        send_resolved: whether resolved alerts are notified.
        place: the node's path from the root, part of the group's key: two routes to one receiver are two groups.
        refresh: the receiver resolves alerts that are not sent again, so they are repeated, acknowledged or not, until they are
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
        """The labels of an alert that form its group."""
        if ALL_LABELS in self.group_by:
            return dict(sorted(labels.items()))
        return {name: labels[name] for name in sorted(set(self.group_by)) if name in labels}


def routes_for(tree: RouteNode, labels: Mapping[str, str], notify: Iterable[str] = ()) -> tuple[Route, ...]:
    """The routes of an alert, in the tree's order.

    Args:
        tree: the project's tree.
        labels: the alert's labels, as returned by `notification.alert_labels`.
        notify: receivers that the alert's rule config names; those without a route are added with the root's
            grouping.
    """
    root = _inherit(Route(""), tree, "r")
    routes = list(_walk(tree, root, labels))
    reached = {route.receiver for route in routes}
    named = (name for name in dict.fromkeys(notify) if name not in reached)
    return (*routes, *(replace(root, receiver=name, place=f"n:{name}") for name in named))


def _walk(node: RouteNode, route: Route, labels: Mapping[str, str]) -> Iterator[Route]:
    taken = False
    for number, child in enumerate(node.routes):
        if not all(parse_matcher(text).matches(labels) for text in child.matchers):
            continue
        taken = True
        yield from _walk(child, _inherit(route, child, f"{route.place}/{number}"), labels)
        if not child.continues:
            return
    if not taken and route.receiver:
        yield route


def _inherit(route: Route, node: RouteNode, place: str) -> Route:
    settings: dict[str, Any] = {
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
    return replace(route, place=place, **settings)


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
