"""JSON documents of a run: its identity, attempts, checkpoints and the ends of its workers; and a parser for JSON from untrusted writers.

`parse_json` rejects a text before parsing if its objects could exceed a memory limit. An empty list is two bytes of text and 64
bytes of memory: a text of a few megabytes can take gigabytes after parsing.

A `Checkpoint` is reported by the program; `last_good` is the last one before a bad step.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from watchstep.errors import BadNameError, FormatError, MissingStoreError, NotFoundError, StoreError
from watchstep.format.layout import CHECKPOINTS, SCHEMA_VERSION, check_name, check_schema
from watchstep.store.store import Store

_MIB = 1024 * 1024
_OBJECT, _KEY, _LIST, _ELEMENT = 156, 132, 120, 56
"""Maximum bytes of memory for each brace, colon, bracket and comma of a text, measured on CPython 3.10 to 3.13 with `tracemalloc`:
a container or entry, and the number or the head of the text in it."""

_NARROW, _WIDE = 2, 9
"""Maximum bytes of memory for each byte of a text, decoded and again in its strings: one character outside ASCII makes each
character of its string take four bytes."""


_LONG = 256 * 1024
"""Size of a text in bytes from which the cyclic garbage collector is paused: it would traverse all objects of the process repeatedly while the parser, which
has the GIL, creates new ones. In a process of the service, three megabytes of empty lists take 0.1 s with the pause, and 1 s without."""


_MOST_DIGITS = 400
_MANY_DIGITS = re.compile(rb"(?<![0-9])[0-9]{%d}" % _MOST_DIGITS)
"""Python converts a number in a time that grows with the square of its digits, with the GIL: 254 MB of 4,300 digits each take 4.5 s. The search begins at the
first digit of each number, so that its time does not."""


_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
"""No program of ours writes one. Their replacement parses a text a second time, so that texts of a megabyte or more with one are refused."""


class OversizedJsonError(ValueError):
    """The objects of a text could exceed the memory limit."""


def parse_json(
    data: bytes, limit: int, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Parse a JSON text. Lone surrogates, which UTF-8 and databases do not accept, become question marks; texts of a megabyte or more with one are refused.

    Args:
        data: The text in UTF-8.
        limit: Maximum memory of the objects in bytes.
        unique: Like ``object_pairs_hook`` of `json.loads`.

    Raises:
        OversizedJsonError: The objects could exceed the limit.
        ValueError, RecursionError: The text is not JSON.
    """
    needed = memory_needed(data)
    if needed > limit:
        raise OversizedJsonError(
            f"a JSON text of {len(data)} bytes could take {needed // _MIB} MiB of memory, at most {limit // _MIB} are allowed"
        )
    parsed = _parsed(data, unique)
    if b"\\ud" in data or b"\\uD" in data:
        if len(data) >= _MIB:
            if _LONE_SURROGATE.search(data):
                raise ValueError("a lone surrogate in a text of a megabyte or more")
            return parsed
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    return parsed


def _parsed(data: bytes, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None) -> Any:
    pauses = len(data) >= _LONG and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        if len(data) >= _LONG and _has_many_digits(data):
            # Here only, because a function for each number takes several times as long.
            return json.loads(data, object_pairs_hook=unique, parse_int=_whole_of, parse_float=_float_of)
        return json.loads(data, object_pairs_hook=unique)
    finally:
        if pauses:
            gc.enable()


def _has_many_digits(data: bytes) -> bool:
    """Return whether a number may have `_MOST_DIGITS` digits or more. Other threads run between two parts of a text."""
    parts = range(0, len(data), _LONG)
    return any(_MANY_DIGITS.search(data, start, start + _LONG + _MOST_DIGITS) for start in parts)


def _whole_of(digits: str) -> int:
    return int(_bounded(digits))


def _float_of(digits: str) -> float:
    return float(_bounded(digits))


def _bounded(digits: str) -> str:
    if len(digits) >= _MOST_DIGITS:
        raise OversizedJsonError(f"a number has {len(digits)} digits, fewer than {_MOST_DIGITS} are read")
    return digits


def memory_needed(data: bytes) -> int:
    """Return an upper bound of the memory in bytes that a JSON text takes during and after parsing."""
    narrow = data.isascii() and b"\\u" not in data
    return (
        (_NARROW if narrow else _WIDE) * len(data)
        + _OBJECT * data.count(b"{")
        + _KEY * data.count(b":")
        + _LIST * data.count(b"[")
        + _ELEMENT * data.count(b",")
    )


MAX_BYTES = 4 * 1024 * 1024
_MAX_MEMORY = 32 * 1024 * 1024
_MAX_DEPTH = 64
"""Maximum nesting of lists and objects. Recorders need less than ten levels; encoders of JSON refuse or overflow at some hundreds."""
_MEND = "rewrite it, or remove it"
TERMINATED = "SIGTERM"
"""Prefix of the reason in an end document if SIGTERM ended the worker, or made its program end."""

EndState = Literal["completed", "failed", "stopped"]
OnStop = Literal["ignore", "raise", "callback"]


@dataclass(frozen=True)
class RunDocument:
    """``run.json``: written once, at the creation of the run.

    Attributes:
        project: Name of the project.
        run: Id of the run.
        created_ns: Creation in nanoseconds since the epoch.
        rules: Rule configs, as data, that the recorder requests. They cannot permit ``stop``.
        config: The capture configuration, as data.
        schema: Schema of everything below the run's prefix.
    """

    project: str
    run: str
    created_ns: int
    rules: tuple[dict[str, Any], ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True)
class AttemptDocument:
    """``attempts/<id>.json``: claims an attempt, written by its first worker.

    Attributes:
        attempt: Id of the attempt.
        started_ns: Start in nanoseconds since the epoch.
        world_size: Number of expected workers.
        on_stop: The effect of a cooperative stop.
        host: Host of the first worker.
        config: The capture document: what differs from the built-in configuration.
        seeds: The data of the last `watchstep.SeedReport` of its first worker before it began to record; empty without one. The health in an
            `EndDocument` has the last one of each worker.
        environment: The provenance of the worker that wrote it, without secrets: ``program`` (name of its file), ``program digest``, ``command``,
            ``folder``, ``commit``, ``uncommitted changes``, ``python``, ``host``, ``platform``, ``devices``, ``package NAME``, ``variable NAME``.
        late: Whether ``watchstep sync`` wrote it, after the process had ended: later attempts may have been written before.
    """

    attempt: str
    started_ns: int
    world_size: int = 1
    on_stop: OnStop = "ignore"
    host: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    late: bool = False


@dataclass(frozen=True)
class LaunchDocument:
    """``launches/<attempt>.json``: the process of ``watchstep run``, which may never record anything.

    Attributes:
        attempt: Id of the attempt.
        launched_ns: Launch in nanoseconds since the epoch.
        pid: Process id.
        start_ticks: Start time, as in `watchstep.platform.process.ProcessIdentity`.
        boot: The kernel's id of the boot.
        host: Host of the process, for users.
        namespace: The kernel's name of the process id's PID namespace.
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
    """``end/<attempt>/<worker>.json``: the end of one worker, and how much it recorded.

    Attributes:
        worker: Rank of the worker.
        state: ``completed``, ``failed`` (by an exception) or ``stopped`` (by Watchstep).
        last_step: The last finished step; -1 without one.
        ended_ns: End in nanoseconds since the epoch.
        segments: Number of its writer's segments that contain all its rows, so that readers detect a missing one.
        writer: Id of the writer, as in its segments' keys. Several ranks of a node may share a writer.
        reason: Type and message of the exception, or the reason of the stop.
        health: Counters of the recorder.
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
    """Encode a document."""
    return json.dumps(asdict(document), indent=1, default=str).encode()


def decode(kind: type[Document], data: bytes, name: str) -> Document:
    """Decode a document. Unknown keys of later versions are ignored.

    Args:
        kind: Type of the document.
        data: Content of the document.
        name: Name of the document for error messages.

    Raises:
        FormatError: The bytes are not such a document, are nested deeper than 64 levels, have another schema, or contain a name that
            could leave the run's folder.
    """
    try:
        document = parse_json(data, _MAX_MEMORY)
        _check_depth(document)
        values = {entry.name: document[entry.name] for entry in fields(kind) if entry.name in document}
        if "rules" in values:
            values["rules"] = tuple(dict(rule) for rule in values["rules"])
        _check_types(kind, values)
        for part in ("project", "run", "attempt"):
            if part in values:
                check_name(part, values[part])
        check_schema(name, values.get("schema", SCHEMA_VERSION))
        return kind(**values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{name}: not a document of this kind ({error})", _MEND) from error
    except BadNameError as error:
        raise FormatError(f"{name}: {error.what[:200]}", _MEND) from error


def _check_depth(document: Any) -> None:
    """Check the nesting of a document level by level, so that the depth does not limit the check itself."""
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(_MAX_DEPTH):
        level = [
            entry
            for container in level
            for entry in (container.values() if isinstance(container, dict) else container)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")


def _check_types(kind: type[Document], values: dict[str, Any]) -> None:
    """Check that values have the types of their fields: readers rely on them for objects of any writer."""
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
_MOST_UNREADABLE = 10
_MOST_OF_STEP = 1024
"""Maximum number of checkpoints of a step that are read. Each rank may report one."""
_LONGEST_PATH = 4096
_CHECKPOINT_KEY = re.compile(
    rf"{CHECKPOINTS}(?P<attempt>[^/]+)/(?P<step>\d{{1,19}})-(?P<worker>\d{{1,9}})\.json"
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        path: Path as reported by the program.
        step: The last step with an update in the checkpoint.
        attempt: The attempt that saved it.
        worker: The rank that saved it.
        saved_ns: Save time in nanoseconds since the epoch.
    """

    path: str
    step: int
    attempt: str
    worker: int
    saved_ns: int

    @property
    def key(self) -> str:
        """Key of its object, relative to the run."""
        return f"{CHECKPOINTS}{check_name('attempt', self.attempt)}/{self.step}-{self.worker}.json"

    def encode(self) -> bytes:
        """Encode as the object's content."""
        return json.dumps(asdict(self), indent=1).encode()

    def as_data(self) -> dict[str, Any]:
        """Return a form that can be encoded as JSON."""
        return asdict(self)

    @classmethod
    def decode(cls, data: bytes, key: str) -> Checkpoint:
        """Decode the result of `encode`.

        Raises:
            FormatError: The bytes are not the checkpoint of this key.
        """
        try:
            document = json.loads(data)
            step, worker, saved_ns = (_whole(document[name]) for name in ("step", "worker", "saved_ns"))
            checkpoint = cls(str(document["path"]), step, str(document["attempt"]), worker, saved_ns)
            own_key = checkpoint.key
        except (ValueError, KeyError, TypeError, RecursionError, BadNameError) as error:
            raise FormatError(f"checkpoint {key}: {error!r}", "remove the object") from error
        if own_key != key or len(checkpoint.path) > _LONGEST_PATH:
            raise FormatError(
                f"checkpoint {key}: contains that of {own_key}, with a path of {len(checkpoint.path)} characters",
                f"remove the object; paths of up to {_LONGEST_PATH} characters are read",
            )
        return checkpoint


def find_checkpoints(run_store: Store) -> list[Checkpoint]:
    """Return the checkpoints of a run's attempts in the order of their save times. Unreadable ones are omitted.

    Raises:
        StoreError: The store is unreachable.
    """
    return sorted(_read(run_store, _keys(run_store)), key=lambda checkpoint: checkpoint.saved_ns)


def last_good(run_store: Store, before_step: int | None = None) -> Checkpoint | None:
    """Return the last checkpoint before a bad step, by default the last of all; None without one.

    Only the newest steps are read: of unreadable checkpoints, those of at most ten steps. For one step, the newest attempt takes precedence, of
    1,024 checkpoints at most.

    Raises:
        StoreError: The store is unreachable.
    """
    keys = [key for key in _keys(run_store) if before_step is None or _step(key) < before_step]
    for step in sorted(set(map(_step, keys)), reverse=True)[:_MOST_UNREADABLE]:
        of_step = itertools.islice((key for key in keys if _step(key) == step), _MOST_OF_STEP)
        newest = max(_read(run_store, of_step), key=lambda checkpoint: checkpoint.saved_ns, default=None)
        if newest is not None:
            return newest
    return None


def _keys(run_store: Store) -> list[str]:
    return [entry.key for entry in run_store.entries(CHECKPOINTS) if _CHECKPOINT_KEY.fullmatch(entry.key)]


def _step(key: str) -> int:
    match = _CHECKPOINT_KEY.fullmatch(key)
    return -1 if match is None else int(match["step"])


def _read(run_store: Store, keys: Iterable[str]) -> Iterable[Checkpoint]:
    for key in keys:
        try:
            yield Checkpoint.decode(run_store.get(key, limit=_MAX_CHECKPOINT), key)
        except MissingStoreError:
            raise
        except (NotFoundError, FormatError):
            continue
        except StoreError:
            if not run_store.is_local:
                raise
            continue  # of one object, such as a pipe: the store itself answers


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number of at least 0")
    return value
