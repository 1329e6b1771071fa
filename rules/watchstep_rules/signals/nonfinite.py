"""NaN and infinity: counts in words, usual causes, conclusive rows, and the first module of a step that was not finite.

Outputs are compared in the order of execution, which the timestamps of rows give. Only recorded rows count: outputs that were measured,
or that were still in memory when the loss was not finite. Between the last finite output and the first output that is not finite lie
the module of the latter, functions that the model calls before it, and modules that were not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from watchstep.format import tensors
from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import Finding
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import OfCatalogue, has_role, rows_where

BAD_BATCH = "The data hold NaN or infinity, or a value far beyond all others."
LOOK_AT_INPUT = "Look at model:input at this step: where it holds NaN or infinity, check batches with torch.isfinite before they are fed."
GAPS = "The batch of this step was bad, as measured: values are missing in the data, or what prepares them is at fault."
CHECK_BATCHES = (
    "Find the examples by torch.isfinite, before batches are fed; leave them out, or fill their gaps."
)


def nonfinite(block: Block) -> NDArray[np.int64]:
    """How many elements of each row are NaN or infinite, int64 of shape (n,)."""
    held = block.statistics
    counts: NDArray[np.int64] = held.nan + held.pos_inf + held.neg_inf
    return counts


def counts_of(block: Block, row: int) -> str:
    """The same of one row in words, by kind, with the name of its tensor."""
    return f"{amount_of(block, row)} of {block.info(row).name}"


def amount_of(block: Block, row: int) -> str:
    """The same without the name."""
    held = block.statistics
    kinds = [(held.nan[row], "NaN"), (held.pos_inf[row], "+inf"), (held.neg_inf[row], "-inf")]
    seen = ", ".join(f"{int(number)} {kind}" for number, kind in kinds if number)
    return f"{seen} among {int(held.count[row])} elements"


def is_given(info: TensorInfo) -> bool:
    """Whether a tensor is what a model was called with."""
    return tensors.INPUTS in info.collections


def has_elements(block: Block) -> NDArray[np.bool_]:
    """Rows of tensors with elements, of any kind; bool, shape (n,). For rules about NaN and infinity, or about equality."""
    return block.statistics.count > 0


def has_probe(block: Block, *names: str) -> NDArray[np.bool_]:
    """Rows at which one of the probes was measured; bool, shape (n,)."""
    measured = (np.isfinite(probe(block, name)) for name in names)
    return reduce(np.logical_or, measured, np.zeros(len(block), np.bool_))


_STATE = ("weight", "bias")
_MOST_NAMED = 3
_TRAIN = MODES.index("train")

MARK = "; first non-finite output: "
"""What begins the words of an output in a finding's message."""

_Pass = tuple[int, int, int]
"""Step, worker and mode."""


@dataclass(frozen=True)
class FirstNonfinite:
    """Where one pass was first not finite.

    Attributes:
        tensor: the first output that is not finite, empty where none was recorded.
        words: that output, and what is known of weights and of what came before it; to follow a finding's message.
    """

    tensor: str = ""
    words: str = ""

    def said_with(self, finding: Finding) -> Finding:
        """The finding, with this in its message and data."""
        if not self.words:
            return finding
        return finding.model_copy(update={"message": finding.message + self.words, "origin": self.tensor})


class Origins:
    """The passes of a block, by their rows of outputs, inputs, weights and biases."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._bad = nonfinite(block)
        self._step_of = sort_key(block.step, block.worker)
        rows = np.flatnonzero(rows_where(block, has_role, "output", "input", "loss", *_STATE))
        self._rows = rows[np.argsort(self._step_of[rows], kind="stable")]
        self._steps = self._step_of[self._rows]
        self._known: dict[_Pass, FirstNonfinite] = {}

    def of(self, row: int) -> FirstNonfinite:
        """That of the pass to which a row of the block belongs."""
        block = self._block
        place = (int(block.step[row]), int(block.worker[row]), int(block.mode[row]))
        if place not in self._known:
            start = np.searchsorted(self._steps, self._step_of[row], side="left")
            end = np.searchsorted(self._steps, self._step_of[row], side="right")
            self._known[place] = self._origin(self._rows[start:end], place[2])
        return self._known[place]

    def _origin(self, rows: NDArray[np.intp], mode: int) -> FirstNonfinite:
        block = self._block
        passed = [row for row in rows.tolist() if block.mode[row] == mode]
        state = [row for row in rows.tolist() if block.info(row).role in _STATE and block.mode[row] == _TRAIN]
        outputs = sorted((row for row in passed if block.info(row).role == "output"), key=self.when)
        inputs = [row for row in passed if block.info(row).role == "input"]
        spoilt = [row for row in state if self._bad[row]]
        first = next((place for place, row in enumerate(outputs) if self._bad[row]), None)
        if first is None:
            losses = [row for row in passed if block.info(row).role == "loss"]
            return FirstNonfinite(words=self._weights(spoilt) or self._all_finite(outputs, losses))
        if (
            not first
            and not spoilt
            and any(block.statistics.nan[row] and is_given(block.info(row)) for row in inputs)
        ):
            return (
                FirstNonfinite()
            )  # the input held NaN, and nothing came between; its infinities may be a mask's
        row = outputs[first]
        module = block.info(row).module
        own = [one for one in spoilt if _within(block.info(one), module)]
        # Infinity in another module's weight may be a mask's.
        causes = own or [one for one in spoilt if block.statistics.nan[one]]
        words = f"{MARK}{_named(block.info(row))}, {amount_of(block, row)}"
        if not block.statistics.nan[row]:
            words += self._first_nan(outputs[first:])
        if causes:
            return FirstNonfinite(block.info(row).name, words + self._weights(causes))
        fed = [one for one in inputs if block.info(one).module == module and not is_given(block.info(one))]
        before = fed or outputs[first - 1 : first] or [one for one in inputs if is_given(block.info(one))]
        finite = [block.info(one).name for one in before if not self._bad[one]]
        if any(_within(block.info(one), module) for one in state):
            finite.append(f"the weights of {module or 'the model'}")
        words += _were_finite(finite)
        if block.statistics.nan[row] or not any(block.statistics.nan[one] for one in outputs[first:]):
            words += self._between(row, [one for one in before if not self._bad[one]], fed, outputs[:first])
        return FirstNonfinite(block.info(row).name, words)

    def _between(self, row: int, finite: list[int], fed: list[int], before: list[int]) -> str:
        """What lies between the last tensor that was finite and the first output that was not; infinities that only become NaN later may be a mask's."""
        block, module = self._block, self._block.info(row).module
        last = block.info(before[-1] if before else finite[-1]).name if before or finite else ""
        if fed and all(one in finite for one in fed):
            return f"; it arose in {module}"
        if not last:
            return ""
        if not module or any(_within(block.info(one), module) for one in before):
            where = f"in {module}" if module else "in the model's own forward"
            return f"; it arose after {last}, {where} or in a module that was not recorded"
        if fed:
            return f"; it arose between {last} and {module}, whose input was not finite"
        return f"; it arose between {last} and the end of {module}"

    def when(self, row: int) -> tuple[int, int, str]:
        """Orders rows of outputs as they were executed; those of one time by the order of their modules."""
        info = self._block.info(row)
        return int(self._block.time_ns[row]), info.order, info.name

    def _first_nan(self, outputs: list[int]) -> str:
        """Infinities may be a mask's; so the first NaN after them is named besides."""
        held = self._block.statistics
        name = next((self._block.info(row).name for row in outputs if held.nan[row]), "")
        return f", first NaN: {name}" if name else ""

    def _all_finite(self, outputs: list[int], losses: list[int]) -> str:
        if not outputs:
            return ""
        last = self._block.info(outputs[-1]).name
        words = f"; all {len(outputs)} recorded outputs were finite, the last of them {last}"
        # What a program logs may be infinite on purpose, as a best loss at its start.
        nan = self._block.statistics.nan
        bad = [row for row in losses if nan[row] or (self._bad[row] and self._block.info(row).derived)]
        return f"{words}; it arose between {last} and {self._block.info(bad[0]).name}" if bad else words

    def _weights(self, spoilt: list[int]) -> str:
        if not spoilt:
            return ""
        modules = dict.fromkeys(self._block.info(row).module or "the model" for row in spoilt)
        seen = ", and ".join(counts_of(self._block, row) for row in spoilt[:_MOST_NAMED])
        return f"; weights of {', '.join([*modules][:_MOST_NAMED])} were already non-finite: {seen}"


def execution(block: Block, rows: NDArray[np.intp]) -> tuple[NDArray[np.int64], ...]:
    """Columns that order rows of outputs as they were executed, as `Origins.when` does: time, order of the module, and name."""
    order, name = _orders.get(block.catalogue, "", lambda: _orders_of(block.catalogue))
    tensor = block.tensor[rows]
    return block.time_ns[rows], order[tensor], name[tensor]


def _orders_of(catalogue: tuple[TensorInfo, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each tensor the order of its module, and the rank of its name."""
    names = np.empty(len(catalogue), np.int64)
    names[sorted(range(len(catalogue)), key=lambda place: catalogue[place].name)] = np.arange(len(catalogue))
    return np.array([info.order for info in catalogue], np.int64), names


_orders: OfCatalogue[tuple[NDArray[np.int64], NDArray[np.int64]]] = OfCatalogue()


def _named(info: TensorInfo) -> str:
    return f"{info.name} ({info.module_type})" if info.module_type else info.name


def _within(info: TensorInfo, module: str) -> bool:
    """Whether a parameter belongs to a module or to one inside of it."""
    return not module or info.module == module or info.module.startswith(f"{module}.")


def _were_finite(names: list[str]) -> str:
    if not names:
        return ""
    verb = "were" if len(names) > 1 or names[0].startswith("the weights") else "was"
    return f", while {' and '.join(names)} {verb} finite"
