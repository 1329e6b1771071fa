"""What is known of a recorded tensor besides its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
UNHELD = "unheld"
CONFUSION = "confusion"
SYSTEM = "system"

_MAX_SIZE = 2**63


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
        module_type: the class's name, e.g. ``Conv2d``.
        role: ``weight``, ``bias``, ``gradient``, ``output``, ``input``, ``update``, ``momentum``, ``second_moment``,
            ``state``, ``checksum``, ``label``, ``custom``, ``loss``, ``metric`` or ``system``.
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

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> TensorInfo:
        """Read what `as_data` gave; unknown keys of later versions are left out.

        Raises:
            TypeError, ValueError, KeyError: the data has another form.
        """
        known = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        known["collections"] = tuple(known["collections"])
        known["shape"] = tuple(known.get("shape", ()))
        info = cls(**known)
        words = (info.name, info.role, info.module, info.module_type, info.dtype, info.optimizer)
        if not all(isinstance(word, str) for word in (*words, *info.collections)):
            raise TypeError(f"tensor {str(info.name)[:80]!r}: a word is not text")
        if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in (info.order, *info.shape)):
            raise ValueError(f"tensor {info.name[:80]!r}: its order or shape is impossible")
        if type(info.derived) is not bool:
            raise TypeError(f"tensor {info.name[:80]!r}: derived is neither true nor false")
        return info
