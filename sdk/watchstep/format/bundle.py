"""Bundles: one training step as it was before its update, in one safetensors object per worker.

The object has these tensors::

    document           uint8: a JSON document, see `BundleDocument`
    parameters/NAME    parameters before the update
    buffers/NAME       buffers before the first forward pass of the step
    gradients/NAME     gradients of the step, as the optimizer was about to read them
    gradient_digests   uint8 [gradients, 32]: BLAKE2b of the bytes of each gradient, in the order of the document
    values/NUMBER      tensors and arrays in the batches, arguments, random states and state dictionaries

Nothing in it is code, and no reader executes any of it: values of types without a representation are named as lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import parse_json
from watchstep.format.layout import BUNDLES, BundleKey
from watchstep.format.snapshot import DTYPES, TensorLocation, read_header
from watchstep.store.store import Store

VERSION = 1
DOCUMENT = "document"
DIGESTS = "gradient_digests"
DIGEST_BYTES = 32
PARAMETERS, BUFFERS, GRADIENTS, VALUES = "parameters/", "buffers/", "gradients/", "values/"
MAX_DOCUMENT = 16 * 1024 * 1024
"""Largest JSON document that writers write and readers read, in bytes."""

_MAX_DOCUMENT_MEMORY = 512 * 1024 * 1024
_HINT = "the writer or the transfer damaged it; use another bundle"


@dataclass(frozen=True)
class LostValue:
    """Something that a bundle lacks.

    Attributes:
        path: its place, as ``micro_batches/0/batch/1``.
        reason: why.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class BundleDocument:
    """The document of a bundle.

    Attributes:
        run: ``{"project", "run", "attempt", "worker", "world_size"}``.
        step: the step, as in the run.
        time_ns: when it was taken, in nanoseconds since the epoch.
        reason: ``gate``: the step is the failing one; ``alert``, ``request``, ``program``: the next complete step after one.
        requests: ids of the events or requests that it fulfils.
        program: arguments, working folder, git commit and versions of the program.
        precision: flags of PyTorch that change results.
        model: class, frozen parameters and modules in another mode than the model.
        micro_batches: the forward passes of the step in order: batch, arguments, random states, autocast, losses.
        optimizers: of each optimizer of the model: its class, its state dictionary as a value, the names of its parameters, and ``scaled``: whether
            their gradients are still multiplied by the scale of a gradient scaler.
        objects: state dictionaries of schedulers, scalers and objects that the program named, by name, as values.
        loader: position of the data loader; None if it is unknown.
        gradients: names of the gradients in ``gradient_digests``.
        lost: what is missing, and why.
        redacted: patterns of paths that were left out on purpose.
    """

    run: Mapping[str, Any]
    step: int
    time_ns: int
    reason: str
    requests: tuple[str, ...] = ()
    program: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: tuple[Mapping[str, Any], ...] = ()
    optimizers: tuple[Any, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] | None = None
    gradients: tuple[str, ...] = ()
    lost: tuple[LostValue, ...] = ()
    redacted: tuple[str, ...] = ()

    @property
    def is_failing(self) -> bool:
        """Whether the step is the one that failed."""
        return self.reason == "gate"

    def encode(self) -> bytes:
        """Encode as JSON."""
        data = {**vars(self), "version": VERSION, "lost": [[lost.path, lost.reason] for lost in self.lost]}
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, content: bytes, name: str) -> BundleDocument:
        """Decode the result of `encode`.

        Args:
            content: The JSON document.
            name: Name of the bundle, for messages.

        Raises:
            FormatError: it is damaged, or of another version.
        """
        try:
            data = parse_json(content, _MAX_DOCUMENT_MEMORY)
            if not isinstance(data, dict) or data.get("version") != VERSION:
                version = data.get("version") if isinstance(data, dict) else None
                raise FormatError(
                    f"bundle {name}: version {version!r:.40}",
                    f"this program reads version {VERSION}; install the version that wrote it",
                )
            loader = data["loader"]
            return cls(
                run=_mapping(data["run"]),
                step=_whole(data["step"]),
                time_ns=_whole(data["time_ns"]),
                reason=_text(data["reason"]),
                requests=tuple(map(_text, _list(data["requests"]))),
                program=_mapping(data["program"]),
                precision=_mapping(data["precision"]),
                model=_mapping(data["model"]),
                micro_batches=tuple(map(_mapping, _list(data["micro_batches"]))),
                optimizers=tuple(_list(data["optimizers"])),
                objects=_mapping(data["objects"]),
                loader=None if loader is None else _mapping(loader),
                gradients=tuple(map(_text, _list(data["gradients"]))),
                lost=tuple(LostValue(_text(path), _text(reason)) for path, reason in _list(data["lost"])),
                redacted=tuple(map(_text, _list(data["redacted"]))),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"bundle {name}: {type(error).__name__}: {str(error)[:200]}", _HINT) from error


def _mapping(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"{str(data)[:40]!r} is not a mapping")
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"{str(data)[:40]!r} is not a list")
    return data


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise TypeError(f"{str(data)[:40]!r} is not a text")
    return data


def _whole(data: Any) -> int:
    if type(data) is not int or not 0 <= data < 2**63:
        raise TypeError(f"{str(data)[:40]!r} is not a whole number from 0")
    return data


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. The header and the document have been read and checked; the tensors have not been read.

    Attributes:
        name: path or key, for messages.
        document: the document.
        tensors: locations of the tensors by name.
        size: size of the object in bytes.
    """

    name: str
    document: BundleDocument
    tensors: Mapping[str, TensorLocation]
    size: int
    _store: Store = field(repr=False, compare=False)
    _key: str = field(repr=False, compare=False)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the tensors below a prefix, as `PARAMETERS`, without it."""
        return [name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)]

    def content(self) -> bytes:
        """Read the whole object.

        Raises:
            NotFoundError, StoreError: The object could not be read.
        """
        return self._store.get(self._key)

    def read(self, name: str) -> tuple[NDArray[Any], str]:
        """Read one tensor.

        Returns:
            Its elements, and its dtype as in a safetensors header. bfloat16 and fp8 are returned as their bits, in unsigned integers. The
            array is read-only.

        Raises:
            NotFoundError: The bundle has no such tensor, or no longer exists.
            FormatError: The object is shorter than when it was opened.
            StoreError: The object could not be read.
        """
        location = self.tensors.get(name)
        if location is None:
            raise NotFoundError(f"bundle {self.name} has no {name!r}", "see its 'lost' entries")
        data = self._store.get_range(self._key, location.start, location.length) if location.length else b""
        if len(data) != location.length:
            raise FormatError(f"bundle {self.name}: {name!r} ends too early", _HINT)
        return np.frombuffer(data, DTYPES[location.dtype]).reshape(location.shape), location.dtype


def open_bundle(store: Store, key: str) -> Bundle:
    """Open a bundle on a store.

    Args:
        store: The store.
        key: Key relative to the store.

    Raises:
        NotFoundError: The object does not exist.
        FormatError: It is no bundle, or it is damaged.
        StoreError: The object could not be read.
    """
    size = store.size(key)
    metadata, tensors = read_header(store, key, size)
    if metadata.get("format") != "watchstep.bundle" or DOCUMENT not in tensors:
        raise FormatError(f"{key} is not a bundle", "give an object below bundles/ of a run")
    location = tensors[DOCUMENT]
    if location.length > MAX_DOCUMENT or location.dtype != "U8":
        raise FormatError(
            f"bundle {key}: its document has {location.length} bytes; the limit is {MAX_DOCUMENT}", _HINT
        )
    document = BundleDocument.decode(store.get_range(key, location.start, location.length), key)
    digests = tensors.get(DIGESTS)
    shape = (len(document.gradients), DIGEST_BYTES)
    if digests is not None and (digests.dtype != "U8" or digests.shape != shape):
        raise FormatError(f"bundle {key}: its digests do not match its gradients", _HINT)
    return Bundle(key, document, tensors, size, store, key)


def open_bundle_file(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle in a file.

    Raises:
        NotFoundError: The file does not exist.
        FormatError: It is no bundle, or it is damaged.
        StoreError: It could not be read.
    """
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise NotFoundError(f"bundle {path} does not exist", "check the path")
    return open_bundle(Store.open(file.parent), file.name)


def bundle_keys(run_store: Store) -> list[BundleKey]:
    """Return the keys of the bundles of a run, sorted by attempt, worker and step.

    Raises:
        StoreError: The store is unreachable.
    """
    keys = []
    for entry in run_store.entries(BUNDLES):
        try:
            keys.append(BundleKey.parse(entry.key))
        except FormatError:
            continue  # not Watchstep's
    return sorted(keys)
