"""NaN and infinity: counts as text, usual causes, conclusive rows, and the first module of a step that was not finite.

Outputs are compared in the order of execution, which the timestamps of rows give. Only recorded rows count: outputs that were measured,
or that were still in memory when the loss was not finite. The fault arose between the last finite output and the first output that is
not finite: in the module of the latter, in functions that the model calls before it, or in modules that were not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from watchstep.format import tensors
from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import Advice, Finding
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import CatalogueCache, has_role, rows_where

BAD_BATCH = "The data contain NaN, infinity, or an extreme value."
LOOK_AT_INPUT = "Look at model:input at this step. If it contains NaN or infinity, check batches with torch.isfinite before the forward pass."
GAPS = (
    "The batch of this step was measured as bad: values are missing in the data, or preprocessing is faulty."
)
CHECK_BATCHES = (
    "Find the examples with torch.isfinite before the forward pass; remove them, or impute missing values."
)
USUAL_CAUSES = (
    "The learning rate is too high: weights and then the loss grow without bound.",
    "The loss takes the logarithm of zero, divides by zero, or takes the root of zero.",
    BAD_BATCH,
    "Half precision overflows: the largest float16 is 65504.",
)
WHAT_TO_TRY = (
    "Look at the first recorded tensor of this step that is not finite, in the order of data flow; later ones are consequences.",
    "Lower the learning rate, warm it up, or clip gradients with torch.nn.utils.clip_grad_norm_.",
    "Use losses on logits, such as cross_entropy and binary_cross_entropy_with_logits; add an epsilon under roots and logarithms.",
    LOOK_AT_INPUT,
    "Find the operation and its line of source with watchstep replay RUN --program FILE.py, if the run has a bundle of the step (watchstep bundles RUN).",
    "Under float16 use torch.amp.GradScaler, or use bfloat16.",
)


def advice_for_bad_input(usual: Advice) -> Advice:
    """Advice for a step with a measured bad input: the input is the first cause."""
    return _replaced(usual, GAPS, CHECK_BATCHES)


def advice_for_first_output(usual: Advice) -> Advice:
    """Advice for an output that is the first bad tensor of its step: the batch is the first cause."""
    return _replaced(usual, BAD_BATCH, LOOK_AT_INPUT)


def _replaced(usual: Advice, cause: str, remedy: str) -> Advice:
    causes = (text for text in usual.usual_causes if text != BAD_BATCH)
    remedies = (text for text in usual.what_to_try if text != LOOK_AT_INPUT)
    return Advice((cause, *causes), (remedy, *remedies))


def nonfinite(block: Block) -> NDArray[np.int64]:
    """The number of elements of each row that are NaN or infinite, int64 of shape (n,)."""
    statistics = block.statistics
    counts: NDArray[np.int64] = statistics.nan + statistics.pos_inf + statistics.neg_inf
    return counts


def counts_of(block: Block, row: int) -> str:
    """The counts of one row by kind as text, with the name of its tensor: "3 NaN among 32 elements of fc1.weight"."""
    return f"{amount_of(block, row)} of {block.info(row).name}"


def amount_of(block: Block, row: int) -> str:
    """The counts of one row by kind as text: "3 NaN among 32 elements"."""
    statistics = block.statistics
    kinds = [
        (statistics.nan[row], "NaN"),
        (statistics.pos_inf[row], "+inf"),
        (statistics.neg_inf[row], "-inf"),
    ]
    counts = ", ".join(f"{int(number)} {kind}" for number, kind in kinds if number)
    return f"{counts} among {int(statistics.count[row])} elements"


def is_model_input(info: TensorInfo) -> bool:
    """Whether a tensor is an argument of the model's forward call."""
    return tensors.INPUTS in info.collections


def has_elements(block: Block) -> NDArray[np.bool_]:
    """Rows of tensors with elements; bool, shape (n,). The conclusive rows of rules about NaN and infinity, or about equality."""
    return block.statistics.count > 0


def has_probe(block: Block, *names: str) -> NDArray[np.bool_]:
    """Rows with a value of at least one of the probes; bool, shape (n,)."""
    measured = (np.isfinite(probe(block, name)) for name in names)
    return reduce(np.logical_or, measured, np.zeros(len(block), np.bool_))


_STATE = ("weight", "bias")
_MOST_NAMED = 3
_TRAIN = MODES.index("train")

MARK = "; first non-finite output: "
"""The text before the output in a finding's message."""

_Pass = tuple[int, int, int]
"""Step, worker and mode."""


@dataclass(frozen=True)
class FirstNonfinite:
    """The first output of a pass that is not finite.

    Attributes:
        tensor: the name of the output; empty if none was recorded.
        words: the output, and evidence about weights and earlier tensors, as a suffix of a finding's message.
    """

    tensor: str = ""
    words: str = ""

    def annotate(self, finding: Finding) -> Finding:
        """The finding with this evidence in its message and data."""
        if not self.words:
            return finding
        return finding.model_copy(update={"message": finding.message + self.words, "origin": self.tensor})


class Origins:
    """Finds where the passes of a block were first not finite, from rows of outputs, inputs, weights and biases."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._bad = nonfinite(block)
        self._step_of = sort_key(block.step, block.worker)
        rows = np.flatnonzero(rows_where(block, has_role, "output", "input", "loss", *_STATE))
        self._rows = rows[np.argsort(self._step_of[rows], kind="stable")]
        self._steps = self._step_of[self._rows]
        self._cache: dict[_Pass, FirstNonfinite] = {}

    def of(self, row: int) -> FirstNonfinite:
        """The first output that is not finite of the pass of a row."""
        block = self._block
        key = (int(block.step[row]), int(block.worker[row]), int(block.mode[row]))
        if key not in self._cache:
            start = np.searchsorted(self._steps, self._step_of[row], side="left")
            end = np.searchsorted(self._steps, self._step_of[row], side="right")
            self._cache[key] = self._origin(self._rows[start:end], key[2])
        return self._cache[key]

    def _origin(self, rows: NDArray[np.intp], mode: int) -> FirstNonfinite:
        block = self._block
        passed = [row for row in rows.tolist() if block.mode[row] == mode]
        state = [row for row in rows.tolist() if block.info(row).role in _STATE and block.mode[row] == _TRAIN]
        outputs = sorted((row for row in passed if block.info(row).role == "output"), key=self.when)
        inputs = [row for row in passed if block.info(row).role == "input"]
        bad_state = [row for row in state if self._bad[row]]
        first = next((place for place, row in enumerate(outputs) if self._bad[row]), None)
        if first is None:
            losses = [row for row in passed if block.info(row).role == "loss"]
            return FirstNonfinite(words=self._weights(bad_state) or self._all_finite(outputs, losses))
        if (
            not first
            and not bad_state
            and any(block.statistics.nan[row] and is_model_input(block.info(row)) for row in inputs)
        ):
            # The input contained NaN, and no output is before this one. Infinities of an input may belong to a mask.
            return FirstNonfinite()
        row = outputs[first]
        module = block.info(row).module
        own = [other for other in bad_state if _within(block.info(other), module)]
        # Infinity in another module's weight may belong to a mask.
        causes = own or [other for other in bad_state if block.statistics.nan[other]]
        words = f"{MARK}{_named(block.info(row))}, {amount_of(block, row)}"
        if not block.statistics.nan[row]:
            words += self._first_nan(outputs[first:])
        if causes:
            return FirstNonfinite(block.info(row).name, words + self._weights(causes))
        module_inputs = [
            other
            for other in inputs
            if block.info(other).module == module and not is_model_input(block.info(other))
        ]
        model_inputs = [other for other in inputs if is_model_input(block.info(other))]
        before = module_inputs or outputs[first - 1 : first] or model_inputs
        finite = [block.info(other).name for other in before if not self._bad[other]]
        if any(_within(block.info(other), module) for other in state):
            finite.append(f"the weights of {module or 'the model'}")
        words += _were_finite(finite)
        if block.statistics.nan[row] or not any(block.statistics.nan[other] for other in outputs[first:]):
            finite_rows = [other for other in before if not self._bad[other]]
            between = self._between(row, finite_rows, module_inputs, outputs[:first])
            if between and not state:  # of replicas, the first one records weights
                between += (
                    f", if weights were finite: worker {int(block.worker[row])} recorded none at this step"
                )
            words += between
        return FirstNonfinite(block.info(row).name, words)

    def _between(self, row: int, finite: list[int], module_inputs: list[int], before: list[int]) -> str:
        """Where the fault arose, between the last finite tensor and the first output that is not finite.

        Infinities that become NaN only later may belong to a mask.
        """
        block, module = self._block, self._block.info(row).module
        last = block.info(before[-1] if before else finite[-1]).name if before or finite else ""
        if module_inputs and all(other in finite for other in module_inputs):
            return f"; it arose in {module}"
        if not last:
            return ""
        if not module or any(_within(block.info(other), module) for other in before):
            where = f"in {module}" if module else "in the model's own forward"
            return f"; it arose after {last}, {where} or in a module that was not recorded"
        if module_inputs:
            return f"; it arose between {last} and {module}, whose input was not finite"
        return f"; it arose between {last} and the end of {module}"

    def when(self, row: int) -> tuple[int, int, str]:
        """Sort key for the order of execution of outputs; equal times are ordered by module."""
        info = self._block.info(row)
        return int(self._block.time_ns[row]), info.order, info.name

    def _first_nan(self, outputs: list[int]) -> str:
        """The first NaN after infinities, which may belong to a mask."""
        nan = self._block.statistics.nan
        name = next((self._block.info(row).name for row in outputs if nan[row]), "")
        return f", first NaN: {name}" if name else ""

    def _all_finite(self, outputs: list[int], losses: list[int]) -> str:
        if not outputs:
            return ""
        last = self._block.info(outputs[-1]).name
        worker = int(self._block.worker[outputs[-1]])
        words = (
            f"; all {len(outputs)} recorded outputs of worker {worker} were finite, the last of them {last}"
        )
        if len(outputs) == 1:
            words = f"; the only recorded output of worker {worker}, {last}, was finite"
        # A logged value may be infinite on purpose, for example the best loss at the start.
        block = self._block
        bad = [
            row
            for row in losses
            if block.statistics.nan[row]
            or (self._bad[row] and block.info(row).derived and block.mode[row] == _TRAIN)
        ]
        return f"{words}; it arose between {last} and {self._block.info(bad[0]).name}" if bad else words

    def _weights(self, rows: list[int]) -> str:
        if not rows:
            return ""
        modules = dict.fromkeys(self._block.info(row).module or "the model" for row in rows)
        counts = ", and ".join(counts_of(self._block, row) for row in rows[:_MOST_NAMED])
        return f"; weights of {', '.join([*modules][:_MOST_NAMED])} were already non-finite: {counts}"


def execution(block: Block, rows: NDArray[np.intp]) -> tuple[NDArray[np.int64], ...]:
    """Columns of sort keys for the order of execution of outputs, as in `Origins.when`: time, order of the module, and name."""
    order, name = _orders.get(block.catalogue, "", lambda: _orders_of(block.catalogue))
    tensor = block.tensor[rows]
    return block.time_ns[rows], order[tensor], name[tensor]


def _orders_of(catalogue: tuple[TensorInfo, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order of each tensor's module, and the rank of its name."""
    names = np.empty(len(catalogue), np.int64)
    names[sorted(range(len(catalogue)), key=lambda place: catalogue[place].name)] = np.arange(len(catalogue))
    return np.array([info.order for info in catalogue], np.int64), names


_orders: CatalogueCache[tuple[NDArray[np.int64], NDArray[np.int64]]] = CatalogueCache()


def _named(info: TensorInfo) -> str:
    return f"{info.name} ({info.module_type})" if info.module_type else info.name


def _within(info: TensorInfo, module: str) -> bool:
    """Whether a parameter belongs to a module or one of its submodules."""
    return not module or info.module == module or info.module.startswith(f"{module}.")


def _were_finite(names: list[str]) -> str:
    if not names:
        return ""
    verb = "were" if len(names) > 1 or names[0].startswith("the weights") else "was"
    return f", while {' and '.join(names)} {verb} finite"
