"""JSON documents of a run: its identity, its attempts, its checkpoints, and how its workers ended; and a parser for JSON from untrusted writers.

`parse_json` refuses a text before it is parsed if its objects could take more memory than a limit. An empty list is two bytes of text and 64
bytes of memory: a text of a few megabytes can take gigabytes once it is parsed.

A `Checkpoint` is one that the program reported; `last_good` is the last one before a bad step.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import CHECKPOINTS, SCHEMA_VERSION, check_name, check_schema
from watchstep.store.store import Store

_MIB = 1024 * 1024
_OBJECT, _KEY, _LIST, _ELEMENT = 156, 132, 120, 56
"""Most bytes of memory for each brace, colon, bracket and comma of a text, measured on CPython 3.10 to 3.13 with `tracemalloc`:
a container or entry, and the number or the head of the text in it."""

_NARROW, _WIDE = 2, 9
"""Most bytes of memory for each byte of a text, decoded and once more in its strings: one character beyond ASCII makes each
character of its string take four bytes."""


_LONG = 256 * 1024
"""Bytes of text from which on the collector of cycles is paused: it would walk all objects of the process again and again while the parser, which
holds the interpreter's lock, makes new ones. Three megabytes of empty lists take 0.1 s so, and 1 s otherwise in a process of the service."""


class OversizedJsonError(ValueError):
    """A text whose objects could take more memory than the limit."""


def parse_json(
    data: bytes, limit: int, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Parse a JSON text. Lone surrogates, which neither UTF-8 nor a database takes, become question marks.

    Args:
        data: in UTF-8.
        limit: bytes of memory that the objects may take.
        unique: as ``object_pairs_hook`` of `json.loads`.

    Raises:
        OversizedJsonError: they could take more.
        ValueError, RecursionError: it is no JSON.
    """
    needed = memory_needed(data)
    if needed > limit:
        raise OversizedJsonError(
            f"a JSON text of {len(data)} bytes could take {needed // _MIB} MiB of memory, at most {limit // _MIB} are allowed"
        )
    parsed = _parsed(data, unique)
    if b"\\ud" in data or b"\\uD" in data:
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    return parsed


def _parsed(data: bytes, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None) -> Any:
    pauses = len(data) >= _LONG and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        return json.loads(data, object_pairs_hook=unique)
    finally:
        if pauses:
            gc.enable()


def memory_needed(data: bytes) -> int:
    """Most bytes of memory that a JSON text takes while it is parsed and afterwards; on the safe side."""
    narrow = data.isascii() and b"\\u" not in data
    return (
        (_NARROW if narrow else _WIDE) * len(data)
        + _OBJECT * data.count(b"{")
        + _KEY * data.count(b":")
        + _LIST * data.count(b"[")
        + _ELEMENT * data.count(b",")
    )


MAX_BYTES = 4 * 1024 * 1024
_MAX_MEMORY = 128 * 1024 * 1024
TERMINATED = "SIGTERM"
"""How the reason of an end document begins where SIGTERM ended the worker, or made its program end."""

EndState = Literal["completed", "failed", "stopped"]
OnStop = Literal["ignore", "raise", "callback"]


@dataclass(frozen=True)
class RunDocument:
    """``run.json``: written once, when the run is made.

    Attributes:
        project: the project's name.
        run: the run's id.
        created_ns: nanoseconds since the epoch.
        rules: rule configs, as data, that the recorder asks for. It cannot grant ``stop`` with them.
        config: what to record, as data.
        environment: versions and host, for people.
        schema: of everything below the run's prefix.
    """

    project: str
    run: str
    created_ns: int
    rules: tuple[dict[str, Any], ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True)
class AttemptDocument:
    """``attempts/<id>.json``: the claim on an attempt, written by its first worker.

    Attributes:
        attempt: the attempt's id.
        started_ns: nanoseconds since the epoch.
        world_size: how many workers to expect.
        on_stop: what a cooperative stop will meet.
        host: where the first worker runs.
    """

    attempt: str
    started_ns: int
    world_size: int = 1
    on_stop: OnStop = "ignore"
    host: str = ""


@dataclass(frozen=True)
class LaunchDocument:
    """``launches/<attempt>.json``: the process that ``watchstep run`` became, which may never record anything.

    Attributes:
        attempt: the attempt's id.
        launched_ns: nanoseconds since the epoch.
        pid: the process id.
        start_ticks: when it started, as in `watchstep.platform.process.ProcessIdentity`.
        boot: the kernel's id of that boot.
        host: where it runs, for people.
        namespace: the kernel's name of the PID namespace that the process id belongs to.
    """

    attempt: str
    launched_ns: int
    pid: int
    start_ticks: int
    boot: str
    host: str
    namespace: str


@dataclass(frozen=True)
class EndDocument:
    """``end/<attempt>/<worker>.json``: how one worker ended, and how much it recorded.

    Attributes:
        worker: its rank.
        state: completed, failed (by an exception) or stopped (by Watchstep).
        last_step: the last finished step; -1 where there was none.
        ended_ns: nanoseconds since the epoch.
        segments: how many of its writer's segments it takes until all its rows are there, so that a missing one is known.
        writer: the writer's id, as in its segments' keys; several ranks of a node may have one.
        reason: the exception's type and message, or the stop's reason.
        health: the recorder's counters.
    """

    worker: int
    state: EndState
    last_step: int
    ended_ns: int
    segments: int
    writer: str
    reason: str = ""
    health: dict[str, Any] = field(default_factory=dict)


Document = TypeVar("Document", RunDocument, AttemptDocument, EndDocument, LaunchDocument)


def encode(document: RunDocument | AttemptDocument | EndDocument | LaunchDocument) -> bytes:
    """The bytes of a document."""
    return json.dumps(asdict(document), indent=1, default=str).encode()


def decode(kind: type[Document], data: bytes, name: str) -> Document:
    """Read a document; unknown keys of later versions are left out.

    Args:
        kind: which document.
        data: its bytes.
        name: what to call it in an error.

    Raises:
        FormatError: the bytes are something else, or of another schema.
    """
    try:
        document = parse_json(data, _MAX_MEMORY)
        values = {entry.name: document[entry.name] for entry in fields(kind) if entry.name in document}
        if "rules" in values:
            values["rules"] = tuple(dict(rule) for rule in values["rules"])
        _check_types(kind, values)
        check_schema(name, values.get("schema", SCHEMA_VERSION))
        return kind(**values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{name}: not a document of this kind ({error})", "write it anew, or remove it"
        ) from error


def _check_types(kind: type[Document], values: dict[str, Any]) -> None:
    """Refuse values of another type than the field's: readers count on them, whoever wrote the object."""
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            raise ValueError(f"{name} is {str(values[name])[:80]!r}")


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if hint is int:
        return type(value) is int and -(2**63) <= value < 2**63
    if origin is dict and get_args(hint)[1] is str:
        return isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())
    return isinstance(value, origin or hint)


_MAX_CHECKPOINT = 64 * 1024
_CHECKPOINT_KEY = re.compile(
    rf"{CHECKPOINTS}(?P<attempt>[^/]+)/(?P<step>\d{{1,19}})-(?P<worker>\d{{1,9}})\.json"
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        path: where it lies, as the program said.
        step: the last step whose update it holds.
        attempt: that saved it.
        worker: the rank that saved it.
        saved_ns: when, nanoseconds since the epoch.
    """

    path: str
    step: int
    attempt: str
    worker: int
    saved_ns: int

    @property
    def key(self) -> str:
        """Its object, relative to the run."""
        return f"{CHECKPOINTS}{check_name('attempt', self.attempt)}/{self.step}-{self.worker}.json"

    def encode(self) -> bytes:
        """The object's bytes."""
        return json.dumps(asdict(self), indent=1).encode()

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    @classmethod
    def decode(cls, data: bytes, key: str) -> Checkpoint:
        """Read what `encode` gave.

        Raises:
            FormatError: it is something else.
        """
        try:
            document = json.loads(data)
            step, worker, saved_ns = (_whole(document[name]) for name in ("step", "worker", "saved_ns"))
            return cls(str(document["path"]), step, str(document["attempt"]), worker, saved_ns)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"checkpoint {key}: {error!r}", "remove the object") from error


def find_checkpoints(run_store: Store) -> list[Checkpoint]:
    """The checkpoints of a run's attempts, in the order in which they were saved. What cannot be read is left out.

    Raises:
        StoreError: the store does not answer.
    """
    return sorted(_read(run_store, _keys(run_store)), key=lambda checkpoint: checkpoint.saved_ns)


def last_good(run_store: Store, before_step: int | None = None) -> Checkpoint | None:
    """The last checkpoint that was saved before a bad step; the last of all where none is named; None where there is none.

    Only the newest steps are read. Of one step, the newest attempt's counts.

    Raises:
        StoreError: the store does not answer.
    """
    keys = [key for key in _keys(run_store) if before_step is None or _step(key) < before_step]
    newest = max(map(_step, keys), default=-1)
    checkpoints = list(_read(run_store, (key for key in keys if _step(key) == newest)))
    return max(checkpoints, key=lambda checkpoint: checkpoint.saved_ns, default=None)


def _keys(run_store: Store) -> list[str]:
    return [entry.key for entry in run_store.entries(CHECKPOINTS) if _CHECKPOINT_KEY.fullmatch(entry.key)]


def _step(key: str) -> int:
    match = _CHECKPOINT_KEY.fullmatch(key)
    return -1 if match is None else int(match["step"])


def _read(run_store: Store, keys: Iterable[str]) -> Iterable[Checkpoint]:
    for key in keys:
        try:
            yield Checkpoint.decode(run_store.get(key, limit=_MAX_CHECKPOINT), key)
        except (NotFoundError, FormatError):
            continue


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number of at least 0")
    return value
