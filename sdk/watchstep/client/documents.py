"""Answers of the service as plain data, arrays and Arrow tables. Fields of later versions are left out; ``raw`` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ServiceError
from watchstep.format.snapshot import DTYPES
from watchstep.reading.queries import Heatmap, HistogramSeries

if TYPE_CHECKING:
    import pyarrow as pa


Document = TypeVar("Document")


@dataclass(frozen=True)
class RunInfo:
    """A run in a list; ``alerts`` is phase → number, and ``notes`` is how many that fire are of severity info. Times are nanoseconds since the epoch."""

    project: str
    run: str
    url: str
    state: str
    attempt: str
    last_step: int
    created_ns: int
    ended_ns: int | None
    alerts: Mapping[str, int]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RuleStatus:
    """A rule config of a run and how it stands: its health (ok, no_data, error) is apart from its alert's phase."""

    name: str
    rule: str
    origin: str
    granted_stop: bool
    health: str
    problem: str
    warnings: tuple[str, ...]
    phase: str
    config: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RunState:
    """A run and all that the service knows of it."""

    info: RunInfo
    control: Mapping[str, Any]
    job: Mapping[str, Any] | None
    rules: tuple[RuleStatus, ...]
    health: Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """An alert: a rule config on one attempt. ``details`` are there once it has fired."""

    run: str
    name: str
    rule: str
    attempt: str
    severity: str
    phase: str
    since_step: int
    since_ns: int
    fired_ns: int | None
    resolved_ns: int | None
    finding: Mapping[str, Any] | None
    details: Mapping[str, Any] | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Event:
    """A CloudEvent; ``place`` is where a later call resumes, 0 where the list does not say."""

    id: str
    type: str
    subject: str
    time: str
    data: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    place: int = 0


@dataclass(frozen=True)
class Action:
    """What an event caused, and every try of it."""

    id: int
    kind: str
    event_id: str
    state: str
    outcome: str
    created_ns: int
    finished_ns: int | None
    tries: tuple[Mapping[str, Any], ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class SnapshotInfo:
    """Full tensors of one step of one worker."""

    attempt: str
    worker: int
    step: int
    mode: str
    bytes: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RunToken:
    """A token that records one run; nothing of its secret. Times are nanoseconds since 1970.

    Attributes:
        state: active, expired or revoked.
        created_by: who made it.
        expires_ns: at the latest 14 days after the run has ended.
    """

    id: str
    name: str
    state: str
    created_ns: int
    created_by: str
    expires_ns: int
    revoked_ns: int | None
    last_used_ns: int | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Stop:
    """The answer to a stop; it is not accepted where the attempt has been asked already."""

    accepted: bool
    attempt: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def read(kind: type[Document], data: Any, **more: Any) -> Document:
    """A document from an answer.

    Raises:
        ServiceError: the answer has another form.
    """
    names = [each.name for each in fields(kind) if each.name != "raw"]  # type: ignore[arg-type]
    try:
        values = {name: data[name] for name in names if name in data}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        made: Callable[..., Document] = kind
        return made(**values, **more, raw=data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ServiceError(
            f"an answer is no {kind.__name__} ({error})", "use a client of the service's version"
        ) from error


ARROW = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class TensorBytes:
    """A tensor of a snapshot.

    Attributes:
        dtype: by safetensors' names; bfloat16 and fp8 stand as their bits in ``values``.
        values: of the tensor's shape; read-only.
    """

    dtype: str
    values: NDArray[Any]


def table(content: bytes) -> pa.Table:
    """An Arrow stream.

    Raises:
        ServiceError: it is none.
    """
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.py_buffer(content)).read_all()
    except pa.ArrowInvalid as error:
        raise _other("Arrow", error) from error


def heatmap(data: Any) -> Heatmap:
    """A heatmap; cells without a finite value are NaN."""
    try:
        values = np.array(data["values"], np.float64).reshape(len(data["tensors"]), -1)
        return Heatmap(list(data["tensors"]), np.array(data["edges"], np.int64), values)
    except (KeyError, TypeError, ValueError) as error:
        raise _other("a heatmap", error) from error


def histogram(data: Any) -> HistogramSeries:
    """Histograms over time."""
    try:
        edges = np.array(data["edges"], np.int64)
        counts = np.array(data["counts"], np.int64).reshape(len(edges) - 1, len(data["lower"]))
        lower, upper = (np.array(data[name], np.float64) for name in ("lower", "upper"))
        zeros, nonfinite = (np.array(data[name], np.int64) for name in ("zeros", "nonfinite"))
        return HistogramSeries(edges, lower, upper, counts, zeros, nonfinite)
    except (KeyError, TypeError, ValueError) as error:
        raise _other("histograms", error) from error


def tensor(content: bytes, dtype: str, shape: str) -> TensorBytes:
    """A tensor from its bytes and the headers that describe them."""
    try:
        sizes = [int(size) for size in shape.split(",") if size]
        return TensorBytes(dtype, np.frombuffer(content, DTYPES[dtype]).reshape(sizes))
    except (KeyError, ValueError) as error:
        raise _other("a tensor", error) from error


def _other(what: str, error: Exception) -> ServiceError:
    return ServiceError(f"an answer is not {what} ({error})", "use a client of the service's version")
