"""Experts of a mixture without examples for a long time: a note, because it is not a fault of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import in_training, whole_steps
from watchstep_rules.signals.tensor_selection import (
    CatalogueCache,
    expert_of,
    has_role,
    kind_of_expert,
    rows_where,
    tensors_where,
)


class StarvedExpertParams(Params):
    """Parameters of `StarvedExpert`."""

    records: int = Field(
        50, ge=1, le=1000, description="Consecutive records without a gradient while a sibling has one."
    )


class StarvedExpertState(State):
    """State of `StarvedExpert`.

    Attributes:
        without: consecutive records without a gradient, by ``name@worker``, if above zero.
        noted: whether experts have been reported, and some have been starved since.
        done: whether all reported experts have recovered; nothing is reported again.
    """

    without: dict[str, int] = Field(default_factory=dict)
    noted: bool = False
    done: bool = False


class StarvedExpert(Rule[StarvedExpertParams, StarvedExpertState]):
    """Notes experts of a mixture without a gradient, or with one of zeros, at ``records`` consecutive records, while siblings have one.

    Siblings are weights of the same shape with names that differ in the expert's number: ``experts.3.up.weight`` and
    ``experts.0.up.weight``. No example is routed to such an expert, or its output is not used. The training continues with the others, so
    this is a note, by default with severity info. There is one note per run: experts that starve again are not reported.
    """

    name = "starved_expert"
    summary = "an expert of a mixture gets no examples while its siblings do; the training may be healthy"
    needs = Needs(collections=("gradients", "updates"), roles=("gradient", "update"))
    merge = "watermark"
    usual_causes = (
        "The router sends all examples to other experts, which then learn faster and get more of them.",
        "The load-balancing loss is missing, or its weight is too small.",
        "The capacity of the experts, or the number of experts per example, is too small for the batch.",
    )
    what_to_try = (
        "Log the number of examples of each expert.",
        "Add a load-balancing loss, or raise its weight; or add noise to the router's scores.",
        "Use fewer experts, or route each example to more of them.",
    )
    cannot_distinguish = (
        "Experts that are disabled on purpose, as in staged training, from experts that the router starves.",
        "Experts with all weights in one tensor have no rows of their own.",
    )

    def evaluate(
        self, params: StarvedExpertParams, state: StarvedExpertState, context: Block, block: Block, now: int
    ) -> tuple[StarvedExpertState, list[Finding]]:
        """Follow the weights of experts, step by step."""
        if state.done or not tensors_where(block.catalogue, _is_of_expert).any():
            return state, []
        block = in_training(block)
        chosen = rows_where(block, _is_of_expert)
        if not state.without and _all_have_gradients(block, chosen):
            return state, []
        without, noted, is_alive = dict(state.without), state.noted, _is_alive(block)
        findings: list[Finding] = []
        for rows in _steps(block, chosen):
            starved = _follow(block, rows, is_alive, without, params.records)
            findings.extend(self._finding(params, block, expert) for expert in starved)
            if noted and not any(count >= params.records for count in without.values()):
                return StarvedExpertState(noted=True, done=True), findings
            noted = noted or bool(starved)
        return StarvedExpertState(without=without, noted=noted), findings

    def _finding(self, params: StarvedExpertParams, block: Block, expert: _Starved) -> Finding:
        name = block.info(expert.row).name
        message = (
            f"{name}: {expert_of(name)} has had no gradient at {expert.records} records in a row, while "
            f"{expert.learning} of its {expert.siblings} sibling experts have one: no example is routed to it, or its output is not used"
        )
        return finding_at(
            self.name,
            block,
            expert.row,
            value=float(expert.records),
            threshold=float(params.records),
            message=message,
        )


class _Starved(NamedTuple):
    """A weight of an expert without a gradient.

    Attributes:
        row: the row of its update, or of its zero gradient.
        records: consecutive records without a gradient, up to the limit of the count.
        learning: number of siblings with a gradient.
        siblings: number of siblings.
    """

    row: int
    records: int
    learning: int
    siblings: int


def _is_of_expert(info: TensorInfo) -> bool:
    return info.role in ("gradient", "update") and len(info.shape) > 1 and bool(kind_of_expert(info.name))


def _all_have_gradients(block: Block, chosen: NDArray[np.bool_]) -> bool:
    """Whether each weight of an expert with an update has a gradient at that step, so that steps need not be followed singly."""
    is_gradient = rows_where(block, has_role, "gradient")
    gradients, updates = np.flatnonzero(chosen & is_gradient), np.flatnonzero(chosen & ~is_gradient)
    if not _is_alive(block)[gradients].all() or len(gradients) != len(updates):
        return False
    weight = _weights.get(block.catalogue, "", lambda: _weights_of(block.catalogue))[block.tensor]
    key = sort_key(block.step, block.worker, weight)
    return bool(np.array_equal(np.sort(key[gradients]), np.sort(key[updates])))


def _weights_of(catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
    """The number of the weight of each tensor."""
    numbers: dict[str, int] = {}
    names = (info.name.rpartition(":")[0] for info in catalogue)
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


_weights: CatalogueCache[NDArray[np.int64]] = CatalogueCache()


def _is_alive(block: Block) -> NDArray[np.bool_]:
    """Whether some element of each row is not zero, or is NaN or infinite."""
    statistics = block.statistics
    alive: NDArray[np.bool_] = (statistics.abs_sum > 0) | (statistics.finite < statistics.count)
    return alive


def _steps(block: Block, chosen: NDArray[np.bool_]) -> Iterator[list[int]]:
    """Chosen rows of each step and worker, ascending."""
    for rows in whole_steps(block):
        for worker in np.unique(block.worker[rows]).tolist():
            own = rows[chosen[rows] & (block.worker[rows] == worker)].tolist()
            if own:
                yield own


def _follow(
    block: Block, rows: list[int], is_alive: NDArray[np.bool_], without: dict[str, int], records: int
) -> list[_Starved]:
    """Add the rows of a step of one worker; returns the first weight of each expert that has been starved for long enough."""
    rows_by_name, with_gradient = dict[str, int](), set[str]()
    kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for row in rows:
        info = block.info(row)
        name = info.name.rpartition(":")[0]
        if name not in rows_by_name:
            kinds.setdefault((kind_of_expert(name), info.shape), []).append(name)
        if name not in rows_by_name or info.role == "update":
            rows_by_name[name] = row
        if info.role == "gradient" and is_alive[row]:
            with_gradient.add(name)
    starved: dict[str, _Starved] = {}
    worker = int(block.worker[rows[0]])
    for names in kinds.values():
        learning = sum(name in with_gradient for name in names)
        for name in names:
            key = f"{name}@{worker}"
            if name in with_gradient:
                without.pop(key, None)
            elif learning:
                without[key] = min(without.get(key, 0) + 1, 1000)
                expert = expert_of(name)
                if without[key] >= records and expert not in starved:
                    row = rows_by_name[name]
                    starved[expert] = _Starved(row, without[key], learning, len(names) - 1)
    return list(starved.values())
