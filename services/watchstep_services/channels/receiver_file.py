"""The owner's file of receivers: the receivers of all projects, and the routing tree of projects without one of their own.

Receivers in this file may use the service's AWS permissions and may read secrets from files. The file does not contain
secrets.

The kinds of receivers: how each is configured and how messages are sent to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from watchstep.errors import ConfigError
from watchstep_rules.rule_files.rule_file import Loc, YamlNodes, data_of
from watchstep_services.channels import alertmanager, aws, mail, pagerduty, slack, teams, webhook
from watchstep_services.channels.delivery import DeliveryContext, Message
from watchstep_services.channels.receiver import EncryptedSecret, PlainSecret, Receiver
from watchstep_services.channels.routing import RootNode, RouteNode
from watchstep_services.core.due_action import AttemptResult

Sender = Callable[[Any, Message, DeliveryContext], AttemptResult]
"""Sends a message once.

It takes at most ``delivery.seconds`` in total. The result states whether it is tried again. If it raises an exception, it is tried
again.
"""

AnyReceiver = Annotated[
    webhook.WebhookReceiver
    | slack.SlackReceiver
    | teams.TeamsReceiver
    | pagerduty.PagerDutyReceiver
    | mail.EmailReceiver
    | aws.SnsReceiver
    | aws.SqsReceiver
    | aws.EventBridgeReceiver
    | alertmanager.AlertmanagerReceiver,
    Field(discriminator="kind"),
]

RECEIVER: TypeAdapter[AnyReceiver] = TypeAdapter(AnyReceiver, config=ConfigDict(hide_input_in_errors=True))

_SENDERS: dict[type[Receiver], Sender] = {
    webhook.WebhookReceiver: webhook.send,
    slack.SlackReceiver: slack.send,
    teams.TeamsReceiver: teams.send,
    pagerduty.PagerDutyReceiver: pagerduty.send,
    mail.EmailReceiver: mail.send,
    aws.SnsReceiver: aws.send_to_sns,
    aws.SqsReceiver: aws.send_to_sqs,
    aws.EventBridgeReceiver: aws.send_to_eventbridge,
    alertmanager.AlertmanagerReceiver: alertmanager.send,
}

KINDS = tuple(_SENDERS)
"""All kinds of receivers."""


def send(receiver: Receiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send a message to a receiver, once.

    Raises:
        WatchstepError: an error that the owner of the receiver can correct; it is tried again.
    """
    return _SENDERS[type(receiver)](receiver, message, delivery)


MAX_BYTES = 1_000_000
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LOC = "loc"


class ReceiverFile(BaseModel):
    """Receivers by name, and the routing tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    receivers: tuple[AnyReceiver, ...] = Field((), max_length=500)
    route: RootNode = Field(default_factory=RootNode)

    @field_validator("receivers")
    @classmethod
    def _have_unique_names(cls, receivers: tuple[AnyReceiver, ...]) -> tuple[AnyReceiver, ...]:
        seen: set[str] = set()
        for index, receiver in enumerate(receivers):
            if receiver.name in seen:
                raise _fault(("receivers", index, "name"), f"duplicate receiver name {receiver.name!r}")
            seen.add(receiver.name)
            written = [
                field
                for field, secret in receiver.secrets().items()
                if isinstance(secret, PlainSecret | EncryptedSecret)
            ]
            if written:
                raise _fault(
                    ("receivers", index, written[0]),
                    f"receiver {receiver.name!r}: {written[0]} is a secret, which must not be in the file: "
                    "write {env: NAME} or {file: PATH}",
                )
        return receivers

    @model_validator(mode="after")
    def _route_names_receivers(self) -> ReceiverFile:
        unknown = sorted(self.route.receivers() - self.names)
        if unknown:
            loc = next(loc for loc, name in _named(self.route, ("route",)) if name == unknown[0])
            raise _fault(loc, f"the route names receivers that do not exist: {', '.join(unknown)}")
        return self

    @property
    def names(self) -> frozenset[str]:
        """Names of all receivers."""
        return frozenset(receiver.name for receiver in self.receivers)

    def find(self, name: str) -> AnyReceiver | None:
        """The receiver with this name."""
        return next((receiver for receiver in self.receivers if receiver.name == name), None)


def _fault(loc: Loc, text: str) -> PydanticCustomError:
    """A validation error at a part of the file."""
    return PydanticCustomError("receivers_file", "{text}", {"text": text, _LOC: loc})


def _named(node: RouteNode, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """The receivers that a tree names, with their locations."""
    if node.receiver:
        yield (*loc, "receiver"), node.receiver
    for number, child in enumerate(node.routes):
        yield from _named(child, (*loc, "routes", number))


@dataclass(frozen=True)
class ReceiverFileProblem:
    """A problem in a file: its line, counted from 1, and a message."""

    line: int
    text: str


def load(path: Path) -> ReceiverFile:
    """Read a file of receivers.

    Raises:
        ConfigError: it is missing, unreadable, or not valid; the message contains the first problem with its line.
    """
    checked = check(text_of(path))
    if isinstance(checked, ReceiverFile):
        return checked
    raise ConfigError(
        f"receivers file {path}: line {checked[0].line}: {checked[0].text}",
        f"'watchstep receivers check {path}' reports all problems",
    )


def text_of(path: Path) -> str:
    """Read a file's text.

    Raises:
        ConfigError: it is missing, unreadable, or over `MAX_BYTES`.
    """
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"receivers file {path}: over the limit of {MAX_BYTES} bytes", "shorten it")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"receivers file {path}: cannot be read ({error})", "check the path") from error


def line_of(text: str, name: str, field: str) -> int:
    """The line of a receiver's field in a valid file; the receiver's own line if it has no such field."""
    receivers = data_of(text)["receivers"]
    number = next(number for number, receiver in enumerate(receivers) if receiver["name"] == name)
    return YamlNodes.of(text).line(("receivers", number, field))


def check(text: str) -> ReceiverFile | list[ReceiverFileProblem]:
    """Parse a file; return its content, or all problems by line. No problem repeats a possible secret."""
    try:
        nodes = YamlNodes.of(text)
        data = data_of(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "syntax"
        return [ReceiverFileProblem(mark.line + 1 if mark else 1, f"not YAML: {problem}")]
    except RecursionError:
        return [ReceiverFileProblem(1, "nested too deeply")]
    faults = [ReceiverFileProblem(line, f"duplicate key {key!r}") for key, line in nodes.duplicates()]
    try:
        content = ReceiverFile.model_validate({} if data is None else data)
    except ValidationError as error:
        for fault in error.errors(include_input=False, include_url=False):
            message = fault["msg"].removeprefix("Value error, ")
            path = ".".join(str(part) for part in fault["loc"])
            loc = fault.get("ctx", {}).get(_LOC, fault["loc"])
            faults.append(ReceiverFileProblem(nodes.line(loc), f"{path}: {message}" if path else message))
        return sorted(faults, key=lambda fault: fault.line)
    except RecursionError:
        return [ReceiverFileProblem(1, "nested too deeply")]
    return faults or content


def schema_text() -> str:
    """The JSON schema of receivers files, draft 2020-12, published for editors."""
    schema: dict[str, Any] = ReceiverFile.model_json_schema(by_alias=True)
    schema = {"$schema": DIALECT, **schema, "title": "Watchstep file of receivers"}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
