"""The catalogue of a run: names, kinds, shapes and modes of its tensors, and a cache of decoded catalogues."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Stage = Literal["local", "reduced"]
Mode = Literal["train", "eval", "predict", "global"]
MODES: tuple[Mode, ...] = ("train", "eval", "predict", "global")

WEIGHTS = "weights"
BIASES = "biases"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
OPTIMIZER_STATE = "optimizer_state"
UPDATES = "updates"
LOSSES = "losses"
METRICS = "metrics"
INPUTS = "inputs"
OUTPUTS = "outputs"
LABELS = "labels"
CUSTOM = "custom"
CHECKSUMS = "checksums"
BUFFERS = "buffers"
NOT_IN_OPTIMIZER = "not_in_optimizer"
CONFUSION = "confusion"
SYSTEM = "system"
FINITE_CHECKS = "finite_checks"

MAX_WORD_BYTES = 4096
"""Longest name, or other word, of a tensor: bytes in UTF-8. Readers refuse segments with longer ones."""

_MAX_SIZE = 2**63
_INFO_BYTES = 700
_MARK_BYTES = 16


@dataclass(frozen=True)
class Placement:
    """Which part of a logical tensor a row was measured on.

    Attributes:
        shard_index: this shard, 0 … shard_count - 1.
        shard_count: disjoint shards that make up one replica; they merge.
        replica: replicas are compared, never merged.
        stage: ``local`` before, ``reduced`` after a reduction across workers.
    """

    shard_index: int = 0
    shard_count: int = 1
    replica: int = 0
    stage: Stage = "local"


@dataclass(frozen=True)
class TensorInfo:
    """A recorded tensor, as the user knows it.

    Attributes:
        name: the module path and what of it, e.g. ``conv1.weight``, ``conv1.weight:gradient``, ``conv1:output``.
        collections: the collections that it belongs to, sorted.
        module: path of the module that owns it; empty for losses and metrics.
        module_type: the class's name, e.g. ``Conv2d``; of a loss the function that computed it, e.g. ``NllLoss``, where that is known.
        role: ``weight``, ``bias``, ``gradient``, ``output``, ``input``, ``update``, ``momentum``, ``second_moment``,
            ``state``, ``checksum``, ``finite_check``, ``label``, ``custom``, ``loss``, ``metric`` or ``system``.
        order: rank of the module in the order of its registration; rules take it for depth.
        shape: of the whole logical tensor at its first record.
        dtype: e.g. ``float32``.
        optimizer: which optimizer updates it, where that is known.
        derived: the value was not the program's own (a loss that was divided for accumulation, say).
    """

    name: str
    collections: tuple[str, ...]
    role: str
    module: str = ""
    module_type: str = ""
    order: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    optimizer: str = ""
    derived: bool = False

    @property
    def memory(self) -> int:
        """About how many bytes of memory it takes."""
        words = (self.name, self.role, self.module, self.module_type, self.dtype, self.optimizer)
        return _INFO_BYTES + sum(map(len, (*words, *self.collections))) + 40 * len(self.shape)

    def bounded(self) -> TensorInfo:
        """The same with words of `MAX_WORD_BYTES` at most: itself, or with each longer one cut, and marked by a checksum of all of it."""
        words = (self.name, self.role, self.module, self.module_type, self.dtype, self.optimizer)
        if not any(map(_is_long, (*words, *self.collections))):
            return self
        return replace(
            self,
            name=bounded_word(self.name),
            role=bounded_word(self.role),
            module=bounded_word(self.module),
            module_type=bounded_word(self.module_type),
            dtype=bounded_word(self.dtype),
            optimizer=bounded_word(self.optimizer),
            collections=tuple(map(bounded_word, self.collections)),
        )

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> TensorInfo:
        """Read what `as_data` gave; unknown keys of later versions are left out.

        Raises:
            TypeError, ValueError, KeyError: the data has another form.
        """
        fields = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        fields["collections"] = tuple(fields["collections"])
        fields["shape"] = tuple(fields.get("shape", ()))
        info = cls(**fields)
        words = (info.name, info.role, info.module, info.module_type, info.dtype, info.optimizer)
        for word in (*words, *info.collections):
            if not isinstance(word, str):
                raise TypeError(f"tensor {str(info.name)[:80]!r}: a word is not text")
            check_word("tensor", word)
        if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in (info.order, *info.shape)):
            raise ValueError(f"tensor {info.name[:80]!r}: its order or shape is impossible")
        if type(info.derived) is not bool:
            raise TypeError(f"tensor {info.name[:80]!r}: derived is neither true nor false")
        return info


def bounded_word(word: str) -> str:
    """The word, or its beginning and a checksum of all of it where it has more than `MAX_WORD_BYTES`."""
    if not _is_long(word):
        return word
    whole = word.encode("utf-8", "surrogatepass")
    mark = hashlib.sha256(whole).hexdigest()[:_MARK_BYTES]
    start = whole[: MAX_WORD_BYTES - _MARK_BYTES - 1].decode("utf-8", "ignore")
    return f"{start}~{mark}"


def _is_long(word: str) -> bool:
    # A character takes four bytes at most: most words need not be encoded for this.
    return 4 * len(word) > MAX_WORD_BYTES and len(word.encode("utf-8", "surrogatepass")) > MAX_WORD_BYTES


def check_word(kind: str, word: str) -> None:
    """Refuse a word of more than `MAX_WORD_BYTES`.

    Args:
        kind: what it belongs to, as the message says it.
        word: the word.

    Raises:
        ValueError: it is longer.
    """
    if _is_long(word):
        raise ValueError(
            f"{kind} {word[:80]!r}: a word of {len(word)} characters; {MAX_WORD_BYTES} bytes are the most"
        )


_MOST_TEXT = 32 * 1024 * 1024

Catalogue = tuple[TensorInfo, ...]


class KnownCatalogues:
    """Catalogues by their packed bytes, those that were asked for last. Thread-safe.

    They are kept up to a total of their unpacked text, so that small bytes that unpack to much take no memory for long.
    """

    def __init__(self, most_text: int = _MOST_TEXT) -> None:
        self._most = most_text
        self._entries: OrderedDict[bytes, tuple[int, Catalogue]] = OrderedDict()
        self._text = 0
        self._lock = threading.Lock()

    def get(self, packed: bytes, unpack: Callable[[bytes], tuple[int, Catalogue]]) -> Catalogue:
        """The catalogue of these bytes.

        Args:
            packed: as a segment holds it.
            unpack: gives how long its text is, in bytes, and the catalogue; what it raises is raised.
        """
        with self._lock:
            if packed in self._entries:
                self._entries.move_to_end(packed)
                return self._entries[packed][1]
        size, catalogue = unpack(packed)
        if 8 * size > self._most:
            return catalogue
        with self._lock:
            if packed in self._entries:
                return self._entries[packed][1]
            self._entries[packed] = (size, catalogue)
            self._text += size
            while self._text > self._most:
                _, (gone, _) = self._entries.popitem(last=False)
                self._text -= gone
        return catalogue
