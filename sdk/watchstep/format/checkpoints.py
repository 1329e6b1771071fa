"""The checkpoints that a program said it had saved: what they are on the store, and which of them is good."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import CHECKPOINTS, check_name
from watchstep.store.store import Store

MAX_BYTES = 64 * 1024
_KEY = re.compile(rf"{CHECKPOINTS}(?P<attempt>[^/]+)/(?P<step>\d{{1,19}})-(?P<worker>\d{{1,9}})\.json")


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
            held = json.loads(data)
            step, worker, saved_ns = (_whole(held[name]) for name in ("step", "worker", "saved_ns"))
            return cls(str(held["path"]), step, str(held["attempt"]), worker, saved_ns)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"checkpoint {key}: {error!r}", "remove the object") from error


def find_checkpoints(run_store: Store) -> list[Checkpoint]:
    """The checkpoints of a run's attempts, in the order in which they were saved. What cannot be read is left out.

    Raises:
        StoreError: the store does not answer.
    """
    return sorted(_read(run_store, _keys(run_store)), key=lambda one: one.saved_ns)


def last_good(run_store: Store, before_step: int | None = None) -> Checkpoint | None:
    """The last checkpoint that was saved before a bad step; the last of all where none is named; None where there is none.

    Only the newest steps are read. Of one step, the newest attempt's counts.

    Raises:
        StoreError: the store does not answer.
    """
    keys = [key for key in _keys(run_store) if before_step is None or _step(key) < before_step]
    newest = max(map(_step, keys), default=-1)
    found = list(_read(run_store, (key for key in keys if _step(key) == newest)))
    return max(found, key=lambda one: one.saved_ns, default=None)


def _keys(run_store: Store) -> list[str]:
    return [entry.key for entry in run_store.entries(CHECKPOINTS) if _KEY.fullmatch(entry.key)]


def _step(key: str) -> int:
    found = _KEY.fullmatch(key)
    return -1 if found is None else int(found["step"])


def _read(run_store: Store, keys: Iterable[str]) -> Iterable[Checkpoint]:
    for key in keys:
        try:
            yield Checkpoint.decode(run_store.get(key, limit=MAX_BYTES), key)
        except (NotFoundError, FormatError):
            continue


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number of at least 0")
    return value
