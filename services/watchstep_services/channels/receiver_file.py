"""The owner's file of receivers: who is told in every project, and by which route where a project has none of its own.

It is the owner's, so its receivers may act in AWS with the service's rights and may take secrets from files. Secrets
themselves do not stand in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from watchstep.errors import ConfigError
from watchstep_rules.rule_files.yaml_source import Loc, YamlNodes, data_of
from watchstep_services.channels.kinds import AnyReceiver
from watchstep_services.channels.receiver import EncryptedSecret, PlainSecret
from watchstep_services.channels.routing import RootNode, RouteNode

MAX_BYTES = 1_000_000
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLACE = "place"


class ReceiverFile(BaseModel):
    """Receivers by name, and the routing tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    receivers: tuple[AnyReceiver, ...] = Field((), max_length=500)
    route: RootNode = Field(default_factory=RootNode)

    @field_validator("receivers")
    @classmethod
    def _are_told_apart(cls, receivers: tuple[AnyReceiver, ...]) -> tuple[AnyReceiver, ...]:
        seen: set[str] = set()
        for place, receiver in enumerate(receivers):
            if receiver.name in seen:
                raise _fault(("receivers", place, "name"), f"two receivers are called {receiver.name!r}")
            seen.add(receiver.name)
            written = [
                field
                for field, secret in receiver.secrets().items()
                if isinstance(secret, PlainSecret | EncryptedSecret)
            ]
            if written:
                raise _fault(
                    ("receivers", place, written[0]),
                    f"receiver {receiver.name!r}: {written[0]} is a secret, which does not stand in a file: "
                    "write {env: NAME} or {file: PATH}",
                )
        return receivers

    @model_validator(mode="after")
    def _routes_lead_somewhere(self) -> ReceiverFile:
        unknown = sorted(self.route.receivers() - self.names)
        if unknown:
            place = next(loc for loc, name in _named(self.route, ("route",)) if name == unknown[0])
            raise _fault(place, f"the route names receivers that are not there: {', '.join(unknown)}")
        return self

    @property
    def names(self) -> frozenset[str]:
        """Of all receivers."""
        return frozenset(receiver.name for receiver in self.receivers)

    def find(self, name: str) -> AnyReceiver | None:
        """The receiver of a name."""
        return next((receiver for receiver in self.receivers if receiver.name == name), None)


def _fault(place: Loc, words: str) -> PydanticCustomError:
    """What is wrong with a part of the file that a validator of the whole has found."""
    return PydanticCustomError("receivers_file", "{words}", {"words": words, _PLACE: place})


def _named(node: RouteNode, place: Loc) -> Iterator[tuple[Loc, str]]:
    """Where a tree names which receiver."""
    if node.receiver:
        yield (*place, "receiver"), node.receiver
    for number, child in enumerate(node.routes):
        yield from _named(child, (*place, "routes", number))


@dataclass(frozen=True)
class ReceiverFileProblem:
    """What is wrong with a file: the line, from 1 on, and the words."""

    line: int
    text: str


def load(path: Path) -> ReceiverFile:
    """Read a file of receivers.

    Raises:
        ConfigError: it is missing, unreadable, or not valid; the message has the first fault with its line.
    """
    read = check(text_of(path))
    if isinstance(read, ReceiverFile):
        return read
    raise ConfigError(
        f"receivers file {path}: line {read[0].line}: {read[0].text}",
        f"'watchstep receivers check {path}' tells all faults",
    )


def text_of(path: Path) -> str:
    """A file's text.

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
    """The line on which a receiver of a file that can be used has a field; the receiver's own where it has none."""
    held = data_of(text)["receivers"]
    number = next(number for number, receiver in enumerate(held) if receiver["name"] == name)
    return YamlNodes.of(text).line(("receivers", number, field))


def check(text: str) -> ReceiverFile | list[ReceiverFileProblem]:
    """A file's receivers and route, or all that is wrong with it, by line. No fault repeats what may be a secret."""
    try:
        places = YamlNodes.of(text)
        data = data_of(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "syntax"
        return [ReceiverFileProblem(mark.line + 1 if mark else 1, f"not YAML: {problem}")]
    except RecursionError:
        return [ReceiverFileProblem(1, "nested too deeply")]
    faults = [ReceiverFileProblem(line, f"{key!r} stands twice") for key, line in places.twice()]
    try:
        read = ReceiverFile.model_validate({} if data is None else data)
    except ValidationError as error:
        for fault in error.errors(include_input=False, include_url=False):
            words = fault["msg"].removeprefix("Value error, ")
            place = ".".join(str(part) for part in fault["loc"])
            where = fault.get("ctx", {}).get(_PLACE, fault["loc"])
            faults.append(ReceiverFileProblem(places.line(where), f"{place}: {words}" if place else words))
        return sorted(faults, key=lambda fault: fault.line)
    except RecursionError:
        return [ReceiverFileProblem(1, "nested too deeply")]
    return faults or read


def schema_text() -> str:
    """The JSON schema of such files, draft 2020-12, as it is published for editors."""
    schema: dict[str, Any] = ReceiverFile.model_json_schema(by_alias=True)
    schema = {"$schema": DIALECT, **schema, "title": "Watchstep file of receivers"}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
