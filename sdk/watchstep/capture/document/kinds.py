"""Kinds of values in a capture document: each reads data, writes data, and has a JSON schema.

A reader collects all problems of a document instead of raising the first one. The SDK has no pydantic: a training container installs
only the base dependencies.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from watchstep.errors import ConfigError
from watchstep.platform.patterns import check_pattern

_MOST_SHOWN = 80
_MOST_NAMES = 12


class CaptureProblem(NamedTuple):
    """An error in a capture document.

    Attributes:
        path: the path of the value: ``collections.encoder.tensors.every``; empty for the document itself.
        text: the value and what is wrong with it.
        hint: how to correct it.
    """

    path: str
    text: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class InvalidValueError(Exception):
    """A value is invalid; the problem is in the list of its place."""


@dataclass(frozen=True)
class Place:
    """A place in a document, and the problems of the document so far."""

    path: str
    problems: list[CaptureProblem] = field(default_factory=list)

    def child(self, name: object) -> Place:
        """Return the place of an entry."""
        return Place(f"{self.path}.{name}" if self.path else str(name), self.problems)

    def reject(self, text: str, hint: str) -> InvalidValueError:
        """Add a problem of this place. Returns the exception to raise."""
        self.problems.append(CaptureProblem(self.path, text, hint))
        return InvalidValueError()


class Kind(Protocol):
    """A kind of values."""

    def read(self, value: Any, place: Place) -> Any:
        """Return the value of a configuration.

        Raises:
            InvalidValueError: the data is invalid.
        """
        ...

    def write(self, value: Any) -> Any:
        """Return the data of a value, JSON-ready."""
        ...

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the data."""
        ...


def shown(value: Any) -> str:
    """Return a value as a message shows it: scalars as in JSON, limited in length."""
    if value is None or isinstance(value, bool | int | float | str):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = reprlib.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def matches_of(word: object, words: Collection[str]) -> str:
    """Return a hint for an unknown word: similar words first, then all."""
    close = difflib.get_close_matches(str(word), words, 3, 0.6)
    listed = ", ".join(list(words)[:_MOST_NAMES]) + (", …" if len(words) > _MOST_NAMES else "")
    return f"did you mean {' or '.join(close)}?" if close else f"use one of {listed}"


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def read(self, value: Any, place: Place) -> bool:
        """See `Kind.read`."""
        if not isinstance(value, bool):
            raise place.reject(f"{shown(value)} is not true or false", "use true or false")
        return value

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return bool(value)

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least``."""

    least: int | None = 0
    example: str = ""

    def read(self, value: Any, place: Place) -> int:
        """See `Kind.read`."""
        wanted = "a whole number" if self.least is None else f"a whole number from {self.least}"
        if type(value) is not int or (self.least is not None and value < self.least):
            raise place.reject(f"{shown(value)} is not {wanted}", self.example or f"use {wanted}")
        return value

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return value

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"type": "integer"} if self.least is None else {"type": "integer", "minimum": self.least}


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>[A-Za-z]*)")


@dataclass(frozen=True)
class Size:
    """A number of bytes from ``least``, or text with a unit: ``10 GiB``."""

    least: int = 0

    def read(self, value: Any, place: Place) -> int:
        """See `Kind.read`."""
        size = _size_of(value) if isinstance(value, str) else value
        if type(size) is not int or size < self.least:
            wanted = f"a number of bytes from {self.least}"
            raise place.reject(f"{shown(value)} is not {wanted}", f'use {wanted}, or a size such as "10 GiB"')
        return size

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return value

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        units = "|".join(_UNITS).strip("|")
        pattern = rf"^[0-9]+(\.[0-9]+)? ?({units})?$"
        return {"anyOf": [{"type": "integer", "minimum": self.least}, {"type": "string", "pattern": pattern}]}


def _size_of(text: str) -> int | None:
    found = _SIZE.fullmatch(text)
    if found is None or found["unit"] not in _UNITS or len(found["number"]) > 18:
        return None
    return int(float(found["number"]) * _UNITS[found["unit"]])


@dataclass(frozen=True)
class Number:
    """A finite number from ``least``, above ``above``, up to ``most``."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    def read(self, value: Any, place: Place) -> float:
        """See `Kind.read`."""
        valid = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if (
            not valid
            or (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        ):
            raise place.reject(f"{shown(value)} is not {self._wanted}", f"use {self._wanted}")
        return float(value)

    @property
    def _wanted(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("from", self.least), ("above", self.above), ("up to", self.most))
            if bound is not None
        ]
        return " ".join(["a number", *bounds])

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return value if math.isfinite(value) else str(value)

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        bounds = {"minimum": self.least, "exclusiveMinimum": self.above, "maximum": self.most}
        return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}


@dataclass(frozen=True)
class Text:
    """Any text."""

    def read(self, value: Any, place: Place) -> str:
        """See `Kind.read`."""
        if not isinstance(value, str):
            raise place.reject(f"{shown(value)} is not text", "use text, in quotes if it looks like a number")
        return value

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return value

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"type": "string"}


@dataclass(frozen=True)
class Pattern(Text):
    """A regular expression."""

    def read(self, value: Any, place: Place) -> str:
        """See `Kind.read`."""
        pattern = super().read(value, place)
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise place.reject(
                f"{shown(pattern)} is not a valid regular expression ({error})",
                "use RE2 syntax; put a backslash before a literal '.', '*', '[' or '('",
            ) from None
        return pattern

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"type": "string", "format": "regex"}


@dataclass(frozen=True)
class Word:
    """One of some words."""

    words: tuple[str, ...]
    noun: str

    def read(self, value: Any, place: Place) -> str:
        """See `Kind.read`."""
        if not isinstance(value, str) or value not in self.words:
            raise place.reject(f"{shown(value)} is not a {self.noun}", matches_of(value, self.words))
        return value

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return value

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"enum": list(self.words)}


@dataclass(frozen=True)
class ListOf:
    """A list, which becomes a tuple."""

    entries: Kind
    example: str

    def read(self, value: Any, place: Place) -> tuple[Any, ...]:
        """See `Kind.read`."""
        if not isinstance(value, list | tuple):
            raise place.reject(f"{shown(value)} is not a list", f"use a list, such as {self.example}")
        read: list[Any] = []
        valid = True
        for number, entry in enumerate(value):
            try:
                read.append(self.entries.read(entry, place.child(number)))
            except InvalidValueError:
                valid = False
        if not valid:
            raise InvalidValueError
        return tuple(read)

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return [self.entries.write(entry) for entry in value]

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"type": "array", "items": self.entries.schema()}


@dataclass(frozen=True)
class Range:
    """A first index, and the index before which a part ends."""

    def read(self, value: Any, place: Place) -> tuple[int, int]:
        """See `Kind.read`."""
        pair = tuple(value) if isinstance(value, list | tuple) else ()
        if len(pair) != 2 or any(type(index) is not int for index in pair) or not 0 <= pair[0] < pair[1]:
            raise place.reject(
                f"{shown(value)} is not a part", "use a first index and a larger end index: [0, 4]"
            )
        return pair

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return list(value)

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 2,
            "maxItems": 2,
        }


@dataclass(frozen=True)
class OrNull:
    """A value, or null for None."""

    kind: Kind

    def read(self, value: Any, place: Place) -> Any:
        """See `Kind.read`."""
        return None if value is None else self.kind.read(value, place)

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return None if value is None else self.kind.write(value)

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        schema = self.kind.schema()
        if set(schema) == {"anyOf"}:
            return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
        return {"anyOf": [schema, {"type": "null"}]}


@dataclass(frozen=True)
class Reference:
    """A kind with its own definition in the schema."""

    name: str
    kind: Kind

    def read(self, value: Any, place: Place) -> Any:
        """See `Kind.read`."""
        return self.kind.read(value, place)

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return self.kind.write(value)

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        return {"$ref": f"#/$defs/{self.name}"}


@dataclass(frozen=True)
class MapOf:
    """A mapping with some keys.

    Attributes:
        keys: the keys, and what the entry of each means.
        noun: what a key is.
        entries: the kind of the entries.
    """

    keys: Mapping[str, str]
    noun: str
    entries: Kind

    def read(self, value: Any, place: Place) -> dict[str, Any]:
        """See `Kind.read`."""
        check_mapping(value, place)
        read: dict[str, Any] = {}
        valid = True
        for key, entry in value.items():
            try:
                if key not in self.keys:
                    raise place.child(key).reject(
                        f"{shown(key)} is not a {self.noun}", matches_of(key, self.keys)
                    )
                read[key] = self.entries.read(entry, place.child(key))
            except InvalidValueError:
                valid = False
        if not valid:
            raise InvalidValueError
        return read

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return {key: self.entries.write(entry) for key, entry in value.items()}

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        properties = {
            key: {**self.entries.schema(), "description": meaning} for key, meaning in self.keys.items()
        }
        return {"type": "object", "properties": properties, "additionalProperties": False}


class Field(NamedTuple):
    """A key of a mapping: the kind of its values, and its meaning."""

    kind: Kind
    meaning: str


@dataclass(frozen=True)
class Section:
    """A mapping that becomes an object of a frozen dataclass.

    Attributes:
        make: the dataclass.
        fields: the keys, which are names of the dataclass's fields.
        check: rejects combinations of valid values, by field.
        short: name of the field that a bare value sets, instead of a mapping; empty for none.
        nested: name of the field that hints suggest for a bare number, and for a key of its own mapping; empty for none.
        nested_keys: the keys of its mapping.
        always: names of fields that are written also with their default values.
    """

    make: Callable[..., Any]
    fields: Mapping[str, Field]
    check: Callable[[Mapping[str, Any], Place], None] = lambda *_: None
    short: str = ""
    nested: str = ""
    nested_keys: tuple[str, ...] = ()
    always: tuple[str, ...] = ()

    def read(self, value: Any, place: Place) -> Any:
        """See `Kind.read`."""
        if self.short and type(value) is int:
            value = {self.short: value}
        return self.read_over(value, place, self.make())

    def read_over(self, value: Any, place: Place, base: Any) -> Any:
        """Return an object with the fields of a mapping, and those of a base for the others.

        Raises:
            InvalidValueError: the data is invalid.
        """
        values = {name: getattr(base, name) for name in self.fields} | self._read_fields(value, place)
        self.check(values, place)
        try:
            return self.make(**values)
        except ConfigError as error:
            raise place.reject(error.what, error.hint) from error

    def _read_fields(self, value: Any, place: Place) -> dict[str, Any]:
        """Return the values of the fields that a mapping sets.

        Raises:
            InvalidValueError: the data is invalid.
        """
        if self.nested and type(value) is int:
            raise place.reject(f"{value} is not a mapping", f"use {{{self.nested}: {value}}}")
        check_mapping(value, place, self.short)
        given: dict[str, Any] = {}
        valid = True
        for key, entry in value.items():
            try:
                if not isinstance(key, str) or key not in self.fields:
                    raise place.child(key).reject("unknown key", self._hint_of(key, entry))
                given[key] = self.fields[key].kind.read(entry, place.child(key))
            except InvalidValueError:
                valid = False
        if not valid:
            raise InvalidValueError
        return given

    def _hint_of(self, key: object, entry: Any) -> str:
        """Return a hint for an unknown key."""
        if key in self.nested_keys:
            return f"use {{{self.nested}: {{{key}: {shown(entry)}}}}}"
        return matches_of(key, tuple(self.fields))

    def write(self, value: Any) -> Any:
        """See `Kind.write`."""
        return self.write_over(value, self.make())

    def write_over(self, value: Any, base: Any) -> dict[str, Any]:
        """Return the data of an object, without fields that equal those of a base."""
        return {
            name: kind.write(getattr(value, name))
            for name, (kind, _) in self.fields.items()
            if name in self.always or getattr(value, name) != getattr(base, name)
        }

    def schema(self) -> dict[str, Any]:
        """See `Kind.schema`."""
        properties = {
            name: {**kind.schema(), "description": meaning} for name, (kind, meaning) in self.fields.items()
        }
        mapping = {"type": "object", "properties": properties, "additionalProperties": False}
        if not self.short:
            return mapping
        kind = self.fields[self.short].kind
        bare = (kind.kind if isinstance(kind, OrNull) else kind).schema()
        return {"anyOf": [{**bare, "description": f"The same as {{{self.short}: N}}."}, mapping]}


def check_mapping(value: Any, place: Place, short: str = "") -> None:
    """Check that a value is a mapping.

    Raises:
        InvalidValueError: it is not.
    """
    if not isinstance(value, Mapping):
        example = f"a number for '{short}', or a mapping" if short else "a mapping: keys with values"
        raise place.reject(f"{shown(value)} is not a mapping", f"use {example}")


def listed(problems: Sequence[CaptureProblem]) -> list[CaptureProblem]:
    """Return the problems without repetitions, in the order in which they were found."""
    return list(dict.fromkeys(problems))
