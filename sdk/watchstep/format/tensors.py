"""The catalogue of a run: names, kinds, shapes and modes of its tensors, and a cache of decoded catalogues."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from watchstep.errors import ConfigError

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
SAVED = "saved"
"""Collection of rows about objects with full tensors: one for each object, once it is on the store (`SavedName`)."""

BUILT_IN = (
    WEIGHTS,
    BIASES,
    GRADIENTS,
    ACTIVATIONS,
    OPTIMIZER_STATE,
    UPDATES,
    LOSSES,
    METRICS,
    INPUTS,
    OUTPUTS,
    LABELS,
    CUSTOM,
    CHECKSUMS,
    BUFFERS,
    NOT_IN_OPTIMIZER,
    CONFUSION,
)
"""Collections that a configuration has by default."""

ROLES = (
    "weight",
    "bias",
    "gradient",
    "update",
    "momentum",
    "second_moment",
    "state",
    "buffer",
    "input",
    "output",
    "label",
    "loss",
    "metric",
    "custom",
    "confusion",
    "checksum",
    "finite_check",
    "buffer_check",
    "not_in_optimizer",
    "feature_importance",
    "tree_depth",
    "system",
    "saved",
)
"""Values of `TensorInfo.role`."""

OF_PROBABILITIES = ":probabilities"
"""End of the function of a loss, if the function expects logits or logarithms and its input was the result of softmax or sigmoid."""

MAX_WORD_BYTES = 4096
"""Maximum length of a tensor's name or other word in UTF-8 bytes. Readers refuse segments with longer ones."""

_MAX_SIZE = 2**63
_INFO_BYTES = 700
_MARK_BYTES = 16


def mode_index(mode: str) -> int:
    """Return the position of a mode in `MODES`, by which rows state it.

    Raises:
        ConfigError: the mode is unknown.
    """
    for index, known in enumerate(MODES):
        if mode == known:
            return index
    raise ConfigError(f"unknown mode {mode!r}", f"use one of {', '.join(MODES)}")


@dataclass(frozen=True)
class Placement:
    """The part of a logical tensor that a row measures.

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
        name: Module path and kind, e.g. ``conv1.weight``, ``conv1.weight:gradient``, ``conv1:output``.
        collections: Collections of the tensor, sorted.
        module: Path of the module that owns it; empty for losses and metrics.
        module_type: Name of the class, e.g. ``Conv2d``; for a loss, the function that computed it, e.g. ``NllLoss``, if known; ``-NllLoss`` if it is negated.
        role: what the tensor is, one of `ROLES`: ``weight``, ``gradient``, ``output``, ….
        order: Rank of the module in the order of registration. Rules use it as the depth.
        shape: Shape of the whole logical tensor at its first record.
        dtype: e.g. ``float32``.
        optimizer: The optimizer that updates it, if known.
        derived: Whether the values in mode ``train`` were computed from the program's own, e.g. a loss that was divided for accumulation.
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
        """Approximate size in memory in bytes."""
        return _INFO_BYTES + sum(map(sys.getsizeof, self.words)) + 40 * len(self.shape)

    @property
    def words(self) -> tuple[str, ...]:
        """All of its strings."""
        words = (self.name, self.role, self.module, self.module_type, self.dtype, self.optimizer)
        return (*words, *self.collections)

    def bounded(self) -> TensorInfo:
        """Return the tensor with words of at most `MAX_WORD_BYTES`: each longer word is truncated and gets a checksum of the whole word."""
        if not any(map(_is_long, self.words)):
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
        """Return a form that can be encoded as JSON."""
        return dict(vars(self))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> TensorInfo:
        """Read the result of `as_data`. Unknown keys of later versions are ignored.

        Raises:
            TypeError, ValueError, KeyError: The data has another form.
        """
        fields = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        fields["collections"] = tuple(fields["collections"])
        fields["shape"] = tuple(fields.get("shape", ()))
        info = cls(**fields)
        words = (info.name, info.role, info.module, info.module_type, info.dtype, info.optimizer)
        for word in (*words, *info.collections):
            if not isinstance(word, str):
                raise TypeError(f"tensor {str(info.name)[:80]!r} has a word that is not text")
            check_word("tensor", word)
        if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in (info.order, *info.shape)):
            raise ValueError(f"tensor {info.name[:80]!r} has an invalid order or shape")
        if type(info.derived) is not bool:
            raise TypeError(f"tensor {info.name[:80]!r}: derived is not a boolean")
        return info


def bounded_word(word: str) -> str:
    """Return the word, or its beginning and a checksum of the whole word if it exceeds `MAX_WORD_BYTES`."""
    if not _is_long(word):
        return word
    whole = word.encode("utf-8", "surrogatepass")
    mark = hashlib.sha256(whole).hexdigest()[:_MARK_BYTES]
    start = whole[: MAX_WORD_BYTES - _MARK_BYTES - 1].decode("utf-8", "ignore")
    return f"{start}~{mark}"


def _is_long(word: str) -> bool:
    # A character takes at most four bytes, so most words need not be encoded.
    return 4 * len(word) > MAX_WORD_BYTES and len(word.encode("utf-8", "surrogatepass")) > MAX_WORD_BYTES


def check_word(kind: str, word: str) -> None:
    """Check that a word has at most `MAX_WORD_BYTES`.

    Args:
        kind: What the word belongs to, for the message.
        word: The word.

    Raises:
        ValueError: The word is longer.
    """
    if _is_long(word):
        raise ValueError(
            f"{kind} {word[:80]!r}has a word of {len(word)} characters; the limit is {MAX_WORD_BYTES} bytes"
        )


_MOST_TEXT = 32 * 1024 * 1024

Catalogue = tuple[TensorInfo, ...]


class KnownCatalogues:
    """Cache of the last requested catalogues by their packed bytes. Thread-safe.

    The total size of their unpacked text is limited, so that small bytes that unpack to large text do not occupy memory for long.
    """

    def __init__(self, most_text: int = _MOST_TEXT) -> None:
        self._most = most_text
        self._entries: OrderedDict[bytes, tuple[int, Catalogue]] = OrderedDict()
        self._text = 0
        self._lock = threading.Lock()

    def get(self, packed: bytes, unpack: Callable[[bytes], tuple[int, Catalogue]]) -> Catalogue:
        """Return the catalogue of these bytes.

        Args:
            packed: The packed bytes, as in a segment.
            unpack: Returns the size of its text in bytes, and the catalogue. Its exceptions propagate.
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


@dataclass(frozen=True)
class SavedName:
    """What the name of a row about a saved object states: ``saved:<mode>:<collection>``.

    The row has the mode ``global`` and the step at which the recorder learned that the object is on the store. Its value is the step of the
    object.

    Attributes:
        mode: mode of the object.
        collection: its collection.
    """

    mode: Mode
    collection: str

    def info(self, number: int = 0) -> TensorInfo:
        """Describe the row; ``number`` distinguishes rows with the same mode and collection at one step."""
        suffix = f":{number}" if number else ""
        name = f"{SAVED}:{self.mode}:{self.collection}{suffix}"
        return TensorInfo(name, (SAVED,), "saved", shape=(), dtype="float64")

    @classmethod
    def of(cls, info: TensorInfo) -> SavedName | None:
        """Parse the name of a row; None for a row about anything else."""
        words = info.name.split(":")
        if info.role != "saved" or len(words) not in {3, 4} or words[0] != SAVED or words[1] not in MODES:
            return None
        return cls(words[1], words[2])
