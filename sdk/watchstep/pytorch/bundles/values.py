"""Values of a program as JSON with references to tensors, and back. Values of other types are lost, never pickled.

==========================  ==========================================================================
value                       JSON
==========================  ==========================================================================
None, bool, int, float, str the same; a large integer ``{"int": text}``, NaN and infinity ``{"float": text}``
list, tuple, set            ``{"list"|"tuple"|"set": [...]}``; a named tuple also has ``fields``
dict                        ``{"dict": [[key, value], ...]}``
subclass, dataclass         the same with ``type``, the name of its class; read as `RecordedMapping`; also `collections.UserDict`
long list of numbers        ``{"numbers": name, "of": "list"|"tuple"}``
torch.Tensor                ``{"tensor": name, "device", "requires_grad"}``
numpy array or scalar       ``{"array": name}``
bytes                       ``{"bytes": base64}``
torch.dtype, torch.device   ``{"torch": text}``
other                       ``{"lost": reason, "type"}``
redacted                    ``{"redacted": type}``
==========================  ==========================================================================
"""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import math
import sys
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.format.bundle import VALUES, LostValue
from watchstep.format.snapshot import DTYPES
from watchstep.platform.program_errors import is_of_program
from watchstep.pytorch.probes.staging import has_all_memory
from watchstep.pytorch.tensors.full_tensors import FORMAT_NAMES, shard_of

MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_DECODED = 1_000_000
"""Values of a bundle that a reader decodes, in all of its documents."""
_MAX_TEXT = 1024 * 1024
_MAX_LOST = 1000
_LONG = 256
"""Length from which a list of numbers is stored as an array."""

_NUMBER_BYTES = 40
"""Memory of a number in a list: it and its reference."""

_EXACT_INTEGERS = 2**53
_NUMPY_NAMES = {
    dtype: name for name, dtype in DTYPES.items() if name not in {"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"}
}
_TORCH_DTYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()}


class RecordedMapping(dict[str, Any]):
    """A mapping or dataclass of a program, read from a bundle. Its entries are also attributes.

    Attributes:
        type_name: name of the class that it had.
    """

    type_name: str = ""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the recorded {self.type_name or 'mapping'} has no {name!r}") from None


@dataclasses.dataclass(frozen=True)
class ReferencedTensor:
    """A tensor of a bundle, by its name in the object."""

    name: str
    dtype: str
    values: Tensor | NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.values.shape)


class ValueEncoder:
    """Encodes values, and collects their tensors.

    Attributes:
        tensors: tensors by reference, in order.
        lost: what could not be encoded.
    """

    def __init__(
        self, redact: Sequence[str] = (), is_changed: Callable[[Tensor], bool] = lambda _tensor: False
    ) -> None:
        """Start without values.

        Args:
            redact: patterns of paths that are left out (`fnmatch.fnmatchcase`).
            is_changed: whether a tensor was changed in place since it was referenced.
        """
        self.tensors: list[ReferencedTensor] = []
        self.lost: list[LostValue] = []
        self._redact = tuple(redact)
        self._is_changed = is_changed
        self._names: dict[int, str] = {}
        self._originals: list[Any] = []  # keeps their ids unique
        self._number = 0

    def is_redacted(self, path: str) -> bool:
        """Return whether a path, or something above it, is left out on purpose."""
        parts = path.split("/")
        above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(fnmatch.fnmatchcase(each, pattern) for each in above for pattern in self._redact)

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Encode a value.

        Args:
            value: The value.
            path: Its place, as ``micro_batches/0/batch``.
            depth: Number of containers around it.
        """
        self._number += 1
        if self._number > MAX_VALUES:
            return {"lost": "the bundle has too many values", "type": type(value).__name__}
        if self._redact and self.is_redacted(path):
            return {"redacted": _described(value)}
        if depth > MAX_DEPTH:
            return self.lose(value, path, "it is nested too deeply")
        try:
            return self._encoded(value, path, depth)
        except Exception as error:  # a value of the program may do anything
            if is_of_program(error):
                raise
            return self.lose(value, path, f"{type(error).__name__}: {error}"[:200])

    def _encoded(self, value: Any, path: str, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value), value, path)
        if type(value) in {int, float, str, bytes}:
            return self._plain(value, path)
        if isinstance(value, torch.dtype | torch.device):
            return {"torch": str(value)}
        if isinstance(value, dict):
            return self._dictionary(value, path, depth)
        if isinstance(value, UserDict):
            return {
                **self._dictionary(object.__getattribute__(value, "__dict__")["data"], path, depth),
                "type": type(value).__name__,
            }
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            own = object.__getattribute__(value, "__dict__")
            named = {entry.name: own[entry.name] for entry in dataclasses.fields(value) if entry.name in own}
            return {**self._dictionary(named, path, depth), "type": type(value).__name__}
        for kind, word in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
            if isinstance(value, kind):
                return self._sequence(kind, word, value, path, depth)
        return self.lose(value, path, "values of this type are not stored")

    def _dictionary(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        """Encode a dictionary without a call of the methods of its class, which may load or compute what they return."""
        if not self._has_room_for(dict.__len__(value)):
            return self._lose_large(value, path)
        entries = []
        for key, entry in list(dict.items(value)):
            word = key if type(key) in {str, int} else type(key).__name__
            entries.append(
                [self.encode(key, path, depth + 1), self.encode(entry, f"{path}/{word}", depth + 1)]
            )
        data: dict[str, Any] = {"dict": entries}
        return data if type(value) is dict else {**data, "type": type(value).__name__}

    def _sequence(self, kind: Any, word: str, value: Any, path: str, depth: int) -> dict[str, Any]:
        length = kind.__len__(value)
        items = list(kind.__iter__(value))
        if length >= _LONG and word in {"list", "tuple"} and (numbers := _numbers_of(items)) is not None:
            name = self._referenced(value, _NUMPY_NAMES[numbers.dtype], numbers)
            return {"numbers": name, "of": word}
        if not self._has_room_for(length):
            return self._lose_large(value, path)
        encoded = [self.encode(item, f"{path}/{place}", depth + 1) for place, item in enumerate(items)]
        fields = list(getattr(type(value), "_fields", ())) if word == "tuple" else []
        return {word: encoded, "fields": fields} if fields else {word: encoded}

    def _has_room_for(self, values: int) -> bool:
        return self._number + values <= MAX_VALUES

    def _lose_large(self, value: Any, path: str) -> dict[str, Any]:
        return self.lose(value, path, f"it has too many values; a bundle has at most {MAX_VALUES}")

    def _plain(self, value: Any, path: str) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, int):
            return value if abs(value) < _EXACT_INTEGERS else {"int": str(value)}
        if len(value) > _MAX_TEXT:
            return self.lose(value, path, f"it is longer than {_MAX_TEXT}")
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        value.encode()  # JSON has no lone surrogates
        return value

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.is_meta or tensor.is_nested:
            return self.lose(tensor, path, "nested and meta tensors are not stored")
        if self._is_changed(tensor):
            return self.lose(tensor, path, "it was changed in place after it was yielded, given or read")
        local, part = shard_of(tensor)
        if local is None or part is not None:
            return self.lose(tensor, path, "it is a shard of a larger tensor, or has no values")
        if not has_all_memory(local):
            return self.lose(tensor, path, "the program has freed its memory")
        dtype = FORMAT_NAMES.get(local.dtype)
        if local.layout is not torch.strided or dtype is None or local.is_quantized:
            return self.lose(
                tensor, path, f"tensors with layout {local.layout} and {local.dtype} are not stored"
            )
        name = self._referenced(tensor, dtype, local.detach())
        return {"tensor": name, "device": str(tensor.device), "requires_grad": tensor.requires_grad}

    def _array(self, array: NDArray[Any], value: Any, path: str) -> Any:
        dtype = _NUMPY_NAMES.get(array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype)
        if dtype is None:
            return self.lose(value, path, f"arrays of {array.dtype} are not stored")
        return {"array": self._referenced(value, dtype, array)}

    def _referenced(self, original: Any, dtype: str, values: Tensor | NDArray[Any]) -> str:
        """Return the name of a tensor in the object. The same tensor is stored once."""
        name = self._names.get(id(original))
        if name is None:
            self._originals.append(original)
            name = self._names[id(original)] = f"{VALUES}{len(self.tensors)}"
            self.tensors.append(ReferencedTensor(name, dtype, values))
        return name

    def lose(self, value: Any, path: str, reason: str) -> dict[str, Any]:
        """Return what stands for a value that is lost, and note it in `lost`."""
        if len(self.lost) < _MAX_LOST:
            self.lost.append(LostValue(path, reason))
        return {"lost": reason, "type": type(value).__name__}


def _numbers_of(items: list[Any]) -> NDArray[Any] | None:
    """Return whole numbers of 64 bits, or floating-point numbers, as an array; None for other items."""
    kinds = set(map(type, items))
    try:
        if kinds == {int}:
            return np.array(items, np.int64)
        return np.array(items, np.float64) if kinds == {float} else None
    except OverflowError:
        return None


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


class LostValueError(Exception):
    """A value that is needed is not in the bundle."""


@dataclasses.dataclass
class ValueSource:
    """Where the tensors of values come from.

    Attributes:
        read: returns the elements and the dtype of a tensor of the bundle by its name.
        device: device for tensors that were not in host memory.
        tensors: tensors that were read before, by name and whether they are on the device: values that shared a tensor share it again.
        arrays, numbers: arrays, and long lists and tuples of numbers, that were read before, likewise.
        limit_bytes: largest memory of what was read since `clear`.
        bytes: memory of what was read since `clear`.
        number: number of values that were decoded.
    """

    read: Callable[[str], tuple[NDArray[Any], str]]
    device: torch.device
    tensors: dict[tuple[str, bool], Tensor] = dataclasses.field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    numbers: dict[tuple[str, bool], Any] = dataclasses.field(default_factory=dict)
    limit_bytes: int = sys.maxsize
    bytes: int = 0
    number: int = 0

    def clear(self) -> None:
        """Forget what was read: values that are decoded later have their own tensors."""
        self.tensors, self.arrays, self.numbers = {}, {}, {}
        self.bytes = 0

    def take(self, size: int) -> None:
        """Count memory before it is taken.

        Raises:
            ValueError: It exceeds the limit.
        """
        self.bytes += size
        if self.bytes > self.limit_bytes:
            raise ValueError(f"its values take more than {self.limit_bytes} bytes of memory")


def decode(data: Any, source: ValueSource) -> Any:
    """Decode a value.

    Args:
        data: The result of `ValueEncoder.encode`.
        source: Where its tensors come from.

    Raises:
        LostValueError: A part of it was lost or redacted.
        ValueError: The data has another form.
    """
    source.number += 1
    if source.number > MAX_DECODED:
        raise ValueError(f"it has more than {MAX_DECODED} values")
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, dict):
        raise ValueError(f"{str(data)[:40]!r} is not a value")  # noqa: TRY004 - reported like other damage
    if "lost" in data or "redacted" in data:
        missing = "was redacted" if "redacted" in data else f"is lost: {data['lost']}"
        raise LostValueError(f"a value of type {data.get('type', data.get('redacted'))} {missing}")
    for word, build in _BUILDERS.items():
        if word in data:
            return build(data, source)
    raise ValueError(f"{str(data)[:40]!r} is not a value")


def torch_tensor(elements: NDArray[Any], dtype: str) -> Tensor:
    """Return a tensor with elements as `watchstep.format.bundle.Bundle.read` returns them. It has its own memory."""
    if dtype not in _TORCH_DTYPES:
        raise ValueError(f"PyTorch has no dtype {dtype}")
    if not elements.size:
        return torch.empty(elements.shape, dtype=_TORCH_DTYPES[dtype])
    flat = torch.from_numpy(np.array(elements, order="C").reshape(-1).view(np.uint8).copy())
    return flat.view(_TORCH_DTYPES[dtype]).reshape(elements.shape)


def _tensor_of(data: Any, source: ValueSource) -> Tensor:
    name = _name(data["tensor"])
    on_device = torch.device(str(data.get("device", "cpu"))).type != "cpu"
    tensor = source.tensors.get((name, on_device))
    if tensor is None:
        elements, dtype = source.read(name)
        source.take(elements.nbytes)
        tensor = torch_tensor(elements, dtype)
        if on_device:
            tensor = tensor.to(source.device)
        if data.get("requires_grad") is True and tensor.is_floating_point():
            tensor.requires_grad_()
        source.tensors[name, on_device] = tensor
    return tensor


def _array_of(data: Any, source: ValueSource) -> Any:
    name = _name(data["array"])
    if name not in source.arrays:
        elements = source.read(name)[0]
        source.take(elements.nbytes)
        source.arrays[name] = elements.copy()
    return source.arrays[name]


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{str(name)[:40]!r} is not the name of a tensor")  # noqa: TRY004 - as above
    return name


def _items(items: Any, source: ValueSource) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError("items are not a list")  # noqa: TRY004 - as above
    return [decode(item, source) for item in items]


def _mapping_of(data: Any, source: ValueSource) -> Any:
    entries = {}
    for key, value in data["dict"]:
        decoded = decode(key, source)
        entries[decoded] = decode(value, source)
    if "type" not in data:
        return entries
    mapping = RecordedMapping(entries)
    mapping.type_name = str(data["type"])[:200]
    return mapping


def _long_of(data: Any, source: ValueSource) -> Any:
    name, is_tuple = _name(data["numbers"]), data.get("of") == "tuple"
    if (name, is_tuple) not in source.numbers:
        elements = source.read(name)[0]
        if elements.ndim != 1:
            raise ValueError("long numbers are no list")
        source.take(elements.size * _NUMBER_BYTES)
        numbers = elements.tolist()
        source.numbers[name, is_tuple] = tuple(numbers) if is_tuple else numbers
    return source.numbers[name, is_tuple]


def _torch_value(data: Any, _source: ValueSource) -> Any:
    text = str(data["torch"])
    if text.startswith("torch."):
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{text[:40]!r} is not a dtype")
        return dtype
    return torch.device(text)


_BUILDERS: dict[str, Callable[[Any, ValueSource], Any]] = {
    "tensor": _tensor_of,
    "array": _array_of,
    "list": lambda data, source: _items(data["list"], source),
    "tuple": lambda data, source: tuple(_items(data["tuple"], source)),
    "set": lambda data, source: set(_items(data["set"], source)),
    "dict": _mapping_of,
    "numbers": _long_of,
    "bytes": lambda data, _source: base64.b64decode(data["bytes"], validate=True),
    "int": lambda data, _source: int(str(data["int"])[:5000]),
    "float": lambda data, _source: float(data["float"]),
    "torch": _torch_value,
}
