"""A rule config: a rule with parameters, scope, severity and actions, as data.

Message templates of rule configs: text with ``{field}`` placeholders from a fixed list.

A field is looked up by its name. There are no attributes, indices, conversions or formats, so a template cannot reach anything that is
not listed here. ``{{`` and ``}}`` are literal braces. `one_line` and `lines` reject control characters and unpaired surrogates in texts that are
displayed, sent in headers and stored in a database.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import unicodedata
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from watchstep.errors import RuleError
from watchstep.format.tensors import SavedName, TensorInfo
from watchstep_rules.custom.python_rule import with_source
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_rules.rule import AnyRule, Merge, Needs, Params, Severity, is_metric
from watchstep_rules.signals import tensor_selection

_LARGEST = 2**63
_TEXT_CONTROLS = frozenset("\n\t\r")


def one_line(value: str) -> str:
    """Check that a text has no control characters; returns the text.

    Raises:
        ValueError: the text has a control character.
    """
    return _without_controls(value, frozenset())


def lines(value: str) -> str:
    """Check that a text has no control characters except tabs and line breaks; returns the text.

    Raises:
        ValueError: the text has another control character.
    """
    return _without_controls(value, _TEXT_CONTROLS)


def _without_controls(value: str, allowed: frozenset[str]) -> str:
    for index, character in enumerate(value):
        if unicodedata.category(character) in {"Cc", "Cs"} and character not in allowed:
            raise ValueError(f"{value!r} has a control character at position {index + 1}: remove it")
    return value


ONE_LINE = r"^[^\u0000-\u001f\u007f-\u009f]*$"
"""`one_line` as a pattern for JSON schemas."""

LINES = r"^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]*$"
"""`lines` as a pattern for JSON schemas."""


def check_storable(data: Any) -> None:
    """Check that data can be stored as JSON in any database.

    Raises:
        ValueError: a text has a NUL or an unpaired surrogate, or a number is not finite or has more than 64 bits.
    """
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and ("\0" in value or not _is_whole(value)):
            raise ValueError(f"{value[:100]!r} contains a NUL or an unpaired surrogate: remove it")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number: use a finite one, or omit it")
        elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise ValueError("a number has more than 64 bits: use a smaller one")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


MOST_CHARACTERS = 1000
"""Limit of characters in a template."""

MOST_FILLED = 4000
"""Limit of characters in a message; a longer message is truncated."""

LABEL = "label."
"""``{label.team}`` is the config's label ``team``."""

FIELDS: dict[str, str] = {
    "name": "the rule config's name",
    "rule": "the rule",
    "severity": "the rule config's severity",
    "project": "the run's project",
    "run": "the run's id",
    "attempt": "the attempt",
    "step": "the step of the finding",
    "mode": "the mode of the step",
    "worker": "the rank",
    "tensor": "the tensor's name; 'the run' for a finding about the run as a whole",
    "module": "path of the tensor's module",
    "module_type": "the module's class",
    "role": "the tensor's role in its module",
    "value": "the measured value, in four digits",
    "threshold": "the threshold, in four digits",
    "message": "the finding's own message",
    "since_step": "the first step of the findings that made the alert fire",
}
"""Fields of a template, in addition to the labels."""

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check(text: str, labels: Mapping[str, str] | None, fields: Mapping[str, str] = FIELDS) -> None:
    """Check that every field of a template is defined.

    Args:
        text: the template.
        labels: labels that the template may use; None for any.
        fields: other fields that it may use.

    Raises:
        ValueError: a field is not defined, or a brace is not paired.
    """
    for match in _PART.finditer(text):
        if match[0] in ("{{", "}}"):
            continue
        field = match[1]
        if field is None:
            raise ValueError(f"unpaired brace at character {match.start() + 1}: write {match[0] * 2}")
        label = field.removeprefix(LABEL) if field.startswith(LABEL) else None
        if field in fields or (label and (labels is None or label in labels)):
            continue
        known = ", ".join([*fields, *(LABEL + name for name in (["NAME"] if labels is None else labels))])
        raise ValueError(f"unknown field {{{field}}}; use one of: {known}")


def fill(text: str, values: Mapping[str, str], most: int = MOST_FILLED) -> str:
    """Fill a checked template.

    Args:
        text: the template.
        values: values of the fields, labels with their prefix; a missing value is replaced by a dash.
        most: limit of characters; a longer message is truncated.
    """

    def part(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][:1]
        return values.get(match[1], "-")

    return _PART.sub(part, text)[:most]


_LONGEST_SECONDS = 30 * 86400
_MOST_STEPS = 10**9
_MOST_LABELS = 16
_MOST_INHIBITED = 100
_MOST_ACTIONS = 16

NAME_LENGTH = 128
"""Limit of characters in a rule config's name."""

Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=NAME_LENGTH),
    AfterValidator(one_line),
    Field(json_schema_extra={"pattern": ONE_LINE}),
]
LabelName = Annotated[
    str, StringConstraints(pattern=r"^([a-zA-Z]|_[a-zA-Z0-9])[a-zA-Z0-9_]*$", max_length=64)
]
Word = Annotated[
    str,
    StringConstraints(max_length=256),
    AfterValidator(one_line),
    Field(json_schema_extra={"pattern": ONE_LINE}),
]
Address = Annotated[HttpUrl, Field(json_schema_extra={"pattern": "^[hH][tT][tT][pP][sS]?://."})]
Pattern = Annotated[
    str,
    AfterValidator(one_line),
    Field(json_schema_extra={"maxLength": tensor_selection.LONGEST, "pattern": ONE_LINE}),
]
Message = Annotated[
    str,
    StringConstraints(max_length=MOST_CHARACTERS),
    AfterValidator(lines),
    Field(json_schema_extra={"pattern": LINES}),
]
ReceiverName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]*$", max_length=64)]


@dataclass(frozen=True)
class Timing:
    """How long findings must last before an alert fires, and how long a series must be clean before it is resolved.

    Attributes:
        hold_steps: consecutive judged steps with findings before the alert fires.
        hold_ns: nanoseconds from the first to the last of these steps.
        keep_steps: consecutive judged steps without findings before the alert is resolved.
        keep_ns: nanoseconds from the first to the last of these steps.
    """

    hold_steps: int = 1
    hold_ns: int = 0
    keep_steps: int = 1
    keep_ns: int = 0


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StopAction(_Model):
    """Stop the job."""

    kind: Literal["stop"] = "stop"


class SnapshotAction(_Model):
    """Take a snapshot of the workers' next step."""

    kind: Literal["snapshot"] = "snapshot"


class WebhookAction(_Model):
    """Post the event as a CloudEvent to a URL."""

    kind: Literal["webhook"] = "webhook"
    url: Address


class NotifyAction(_Model):
    """Notify a receiver by its name; receivers are defined in the service."""

    kind: Literal["notify"] = "notify"
    receiver: ReceiverName


class _ShortWebhook(_Model):
    webhook: Address


class _ShortNotify(_Model):
    notify: ReceiverName


def _as_action(value: Any) -> Any:
    if value in ("stop", "snapshot"):
        return {"kind": value}
    if isinstance(value, dict) and list(value) == ["webhook"]:
        return {"kind": "webhook", "url": value["webhook"]}
    if isinstance(value, dict) and list(value) == ["notify"]:
        return {"kind": "notify", "receiver": value["notify"]}
    return value


Action = Annotated[StopAction | SnapshotAction | WebhookAction | NotifyAction, Field(discriminator="kind")]
WrittenAction = Annotated[
    Action,
    BeforeValidator(
        _as_action, json_schema_input_type=Literal["stop", "snapshot"] | _ShortWebhook | _ShortNotify | Action
    ),
]


def _hint(name: str) -> str:
    """A suggestion for an unknown rule name; empty if no name is similar."""
    for rule in RULES.values():
        if getattr(rule.params_type, "amazon", "") == name:
            return f"Amazon's rule of this name is {rule.name}"
    close = difflib.get_close_matches(name, {**RULES, **KINDS}, n=1)
    return f"did you mean {close[0]}?" if close else ""


class TensorScope(_Model):
    """The tensors that a rule config judges. An omitted field does not restrict them."""

    collection: Word | None = Field(None, description="Only tensors of this collection.")
    include: Pattern | None = Field(
        None,
        description="Only tensors with names that this regular expression (RE2 syntax) matches from the start.",
    )
    exclude: Pattern | None = Field(
        None,
        description="No tensors with names that this regular expression (RE2 syntax) matches from the start.",
    )

    @field_validator("include", "exclude")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            tensor_selection.check(value)
        return value

    def selects(self, info: TensorInfo, needs: Needs) -> bool:
        """Whether a rule with these needs receives a tensor: it is in scope, or it is evidence.

        A rule that judges full tensors receives the rows about saved objects of its modes instead; the scope applies to the tensors in
        them.
        """
        if needs.tensors is not None:
            saved, modes = SavedName.of(info), needs.tensors.modes
            return saved is not None and (not modes or saved.mode in modes)
        if any(is_metric(info, name) for name in needs.metrics):
            return True
        evidence = needs.is_evidence(info)
        collections = needs.collections if evidence or not self.collection else (self.collection,)
        return (
            (not collections or any(name in info.collections for name in collections))
            and (not needs.roles or info.role in needs.roles)
            and (evidence or self._chosen(info.name))
        )

    def _chosen(self, name: str) -> bool:
        included = self.include is None or tensor_selection.matches(self.include, name)
        return included and (self.exclude is None or not tensor_selection.matches(self.exclude, name))


class MinimumDuration(_Model):
    """How long findings must last before the alert fires. If both are set, both must be reached."""

    steps: int = Field(
        1, ge=1, le=_MOST_STEPS, description="Consecutive judged steps of one tensor with findings."
    )
    seconds: float = Field(
        0.0,
        ge=0,
        le=_LONGEST_SECONDS,
        description="Seconds since the first of these steps, by the time of its rows.",
    )


class KeepFiring(_Model):
    """How long every tensor that made an alert fire must be clean before the alert is resolved."""

    steps: int = Field(
        1, ge=1, le=_MOST_STEPS, description="Consecutive judged steps of one tensor without a finding."
    )
    seconds: float = Field(
        0.0,
        ge=0,
        le=_LONGEST_SECONDS,
        description="Seconds since the first of these steps, by the time of its rows.",
    )


def _nanoseconds(duration: MinimumDuration | KeepFiring) -> int:
    return round(duration.seconds * 1e9)


class HashedKey:
    """A key of caches with a hash that is computed once. Evaluations look up some hundred values by scope and needs."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashedKey) and self._value == other._value)


class Demand(NamedTuple):
    """What a rule config needs of the rows.

    Attributes:
        needs: the input of the rule.
        lookback: number of earlier rows of each series.
        merge: when rows are judged.
        scope_key: the tensors in scope, as a key of caches.
        lookback_key: these, and the lookback.
    """

    needs: Needs
    lookback: int
    merge: Merge
    scope_key: HashedKey
    lookback_key: HashedKey


class RuleConfig(_Model):
    """A rule with its parameters, scope, severity and actions."""

    rule: Name = Field(description="The rule's name.")
    name: Annotated[str, StringConstraints(max_length=NAME_LENGTH), AfterValidator(one_line)] = Field(
        "",
        json_schema_extra={"pattern": ONE_LINE},
        description="The name of the rule config; the rule's name by default.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, validate_default=True, description="The rule's parameters."
    )
    tensors: TensorScope = Field(TensorScope(), description="The tensors that the rule judges.")
    hold: MinimumDuration = Field(
        MinimumDuration(), alias="for", description="How long findings must last before the alert fires."
    )
    keep_firing: KeepFiring | None = Field(
        None,
        description="How long without findings before the alert is resolved; the value of 'for' by default.",
    )
    severity: Severity = Field(
        "warning",
        description="The severity of alerts. Alerts of severity info are notes: they do not stop, notify or inhibit.",
    )
    labels: dict[LabelName, Word] = Field(
        default_factory=dict, max_length=_MOST_LABELS, description="Labels, which each event contains."
    )
    message: Message | None = Field(
        None,
        description="The message of events, with {fields}; the finding's message by default.",
    )
    actions: tuple[WrittenAction, ...] = Field(
        (), max_length=_MOST_ACTIONS, description="Actions when the alert fires."
    )
    dry_run: bool = Field(
        False, description="Evaluate and display the alert, but do not stop, notify or inhibit."
    )
    inhibits: tuple[Name, ...] = Field(
        (),
        max_length=_MOST_INHIBITED,
        description="Rule configs, or rules, that are inhibited while this alert fires.",
    )

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @field_validator("rule")
    @classmethod
    def _is_known(cls, value: str) -> str:
        try:
            find_rule(value)
        except RuleError as error:
            raise ValueError(f"{error.what}; {_hint(value) or error.hint}") from error
        return value

    @field_validator("params")
    @classmethod
    def _are_of_the_rule(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        check_storable(value)
        if "rule" in info.data:
            value = with_source(info.data["rule"], value)
            find_rule(info.data["rule"]).params_type.model_validate(value, context=info.context)
        return value

    @field_validator("message")
    @classmethod
    def _names_fields(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check(value, info.data.get("labels", {}))
        return value

    @field_validator("inhibits")
    @classmethod
    def _can_inhibit(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        rule = info.data.get("rule")
        if value and rule is not None and find_rule(rule).clock:
            raise ValueError(f"{rule} watches the clock, not steps, and cannot inhibit")
        return value

    @model_validator(mode="after")
    def _notes_cause_nothing(self) -> RuleConfig:
        if self.severity != "info":
            return self
        causes: list[str] = sorted({action.kind for action in self.actions} - {"snapshot"})
        if self.inhibits:
            causes.append("inhibits")
        if causes:
            raise ValueError(
                f"severity info with {', '.join(causes)}: an alert of severity info is a note, which does not stop, notify or inhibit; "
                "use severity warning or critical"
            )
        return self

    @model_validator(mode="after")
    def _named(self) -> RuleConfig:
        if not self.name:
            object.__setattr__(self, "name", self.rule)
        return self

    @property
    def implementation(self) -> AnyRule:
        """The rule object."""
        return find_rule(self.rule)

    @property
    def parameters(self) -> Params:
        """The validated parameters of the rule, with defaults filled in."""
        rule, checked = self._checked
        return checked if rule is self.implementation else self._check()

    @functools.cached_property
    def _checked(self) -> tuple[AnyRule, Params]:
        return self.implementation, self._check()

    @property
    def demand(self) -> Demand:
        """What the rule needs with its parameters."""
        rule, demand = self._demand
        return demand if rule is self.implementation else self._demanded()

    @functools.cached_property
    def _demand(self) -> tuple[AnyRule, Demand]:
        return self.implementation, self._demanded()

    def _demanded(self) -> Demand:
        rule, params = self.implementation, self.parameters
        needs, lookback = rule.needed(params), rule.lookback(params)
        scope = HashedKey((self.tensors, needs))
        return Demand(needs, lookback, rule.merged(params), scope, HashedKey((self.tensors, needs, lookback)))

    def _check(self) -> Params:
        checked: Params = self.implementation.params_type.model_validate(self.params)
        return checked

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> RuleConfig:
        """Like pydantic's, but without what is cached of the parameters."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_checked", None)
        copied.__dict__.pop("_demand", None)
        return copied

    @property
    def timing(self) -> Timing:
        """``for`` and ``keep_firing`` as `Timing`."""
        keep = self.keep_firing or self.hold
        return Timing(self.hold.steps, _nanoseconds(self.hold), keep.steps, _nanoseconds(keep))

    @property
    def stops(self) -> bool:
        """Whether an alert of this config stops the job."""
        return not self.dry_run and any(isinstance(action, StopAction) for action in self.actions)

    @property
    def takes_snapshot(self) -> bool:
        """Whether a snapshot is taken when an alert of this config fires."""
        return not self.dry_run and any(isinstance(action, SnapshotAction) for action in self.actions)

    @property
    def webhooks(self) -> tuple[str, ...]:
        """URLs to which events are posted."""
        return tuple(str(action.url) for action in self.actions if isinstance(action, WebhookAction))

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers that are notified."""
        return tuple(action.receiver for action in self.actions if isinstance(action, NotifyAction))

    def matches_name(self, name: str) -> bool:
        """Whether a name is the name of this rule config or of its rule."""
        return name in (self.name, self.rule)

    def without_inhibits(self) -> RuleConfig:
        """A copy without ``inhibits``, which recorders may not set. Whether it may stop the job is decided by the service."""
        return self.model_copy(update={"inhibits": ()})

    def as_data(self) -> dict[str, Any]:
        """JSON-ready data that validates to an equal rule config."""
        return self.model_dump(mode="json", by_alias=True)
