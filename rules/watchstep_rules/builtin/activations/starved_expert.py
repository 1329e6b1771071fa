"""Experts of a mixture that get no examples for long: a note, for it is no fault of the program."""

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
    OfCatalogue,
    expert_of,
    has_role,
    kind_of_expert,
    rows_where,
    tensors_where,
)


class StarvedExpertParams(Params):
    """Parameters of `StarvedExpert`."""

    records: int = Field(
        50, ge=1, le=1000, description="Records in a row without a gradient, while a sibling has one."
    )


class StarvedExpertState(State):
    """Of each weight of an expert, by ``name@worker``, records in a row without a gradient; and how far the note is.

    Attributes:
        without: those that are above zero.
        noted: experts have been noted, and some are starved since.
        done: they were, and none is any more: nothing is said again.
    """

    without: dict[str, int] = Field(default_factory=dict)
    noted: bool = False
    done: bool = False


class StarvedExpert(Rule[StarvedExpertParams, StarvedExpertState]):
    """Notes experts of a mixture whose weights have no gradient, or one of zeros, at ``records`` records in a row, while siblings have one.

    Siblings are weights of one shape whose names differ in the expert's number: ``experts.3.up.weight`` and ``experts.0.up.weight``. No
    example goes to such an expert, or what it gives is not used. The training goes on with the others, so that this is a note, by default
    of severity info. It is one note for each run: of experts that recover, nothing is said again.
    """

    name = "starved_expert"
    summary = "an expert of a mixture gets no examples while its siblings do; the training may be sound"
    needs = Needs(collections=("gradients", "updates"), roles=("gradient", "update"))
    merge = "sealed"
    usual_causes = (
        "The router sends all examples to other experts, which then learn faster and get more of them.",
        "The loss that balances the load of the experts is missing, or its weight is too small.",
        "The capacity of the experts, or the number of them that an example goes to, is too small for the batch.",
    )
    what_to_try = (
        "Log how many examples each expert gets.",
        "Add a loss that balances the load, or raise its weight; or add noise to the router's scores.",
        "Use fewer experts, or let each example go to more of them.",
    )
    cannot_distinguish = (
        "Experts that are switched off on purpose, as in training in stages, from experts that the router starves.",
        "Experts whose weights are one tensor have no rows of their own.",
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
            findings.extend(self._finding(params, block, one) for one in starved)
            if noted and not any(count >= params.records for count in without.values()):
                return StarvedExpertState(noted=True, done=True), findings
            noted = noted or bool(starved)
        return StarvedExpertState(without=without, noted=noted), findings

    def _finding(self, params: StarvedExpertParams, block: Block, one: _Starved) -> Finding:
        message = (
            f"{block.info(one.row).name}: {expert_of(block.info(one.row).name)} has had no gradient at {one.records} records in a row, while "
            f"{one.fed} of its {one.siblings} sibling experts have one: no example goes to it, or its output is not used"
        )
        return finding_at(
            self.name,
            block,
            one.row,
            value=float(one.records),
            threshold=float(params.records),
            message=message,
        )


class _Starved(NamedTuple):
    """A weight of an expert without a gradient.

    Attributes:
        row: of its update, or of its gradient that is zero.
        records: in a row without one, as far as they are counted.
        fed: siblings with a gradient.
        siblings: all of them.
    """

    row: int
    records: int
    fed: int
    siblings: int


def _is_of_expert(info: TensorInfo) -> bool:
    return info.role in ("gradient", "update") and len(info.shape) > 1 and bool(kind_of_expert(info.name))


def _all_have_gradients(block: Block, chosen: NDArray[np.bool_]) -> bool:
    """Whether each weight of an expert with an update has a gradient at that step: nothing needs to be looked at singly."""
    is_gradient = rows_where(block, has_role, "gradient")
    gradients, updates = np.flatnonzero(chosen & is_gradient), np.flatnonzero(chosen & ~is_gradient)
    if not _is_alive(block)[gradients].all() or len(gradients) != len(updates):
        return False
    weight = _weights.get(block.catalogue, "", lambda: _weights_of(block.catalogue))[block.tensor]
    key = sort_key(block.step, block.worker, weight)
    return bool(np.array_equal(np.sort(key[gradients]), np.sort(key[updates])))


def _weights_of(catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
    """Of each tensor the number of the weight that it is about."""
    numbers: dict[str, int] = {}
    names = (info.name.rpartition(":")[0] for info in catalogue)
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


_weights: OfCatalogue[NDArray[np.int64]] = OfCatalogue()


def _is_alive(block: Block) -> NDArray[np.bool_]:
    """Of each row, whether some element is not zero, or is no number."""
    held = block.statistics
    alive: NDArray[np.bool_] = (held.abs_sum > 0) | (held.finite < held.count)
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
    """Take in the rows of a step of one worker; the first weight of each expert that is starved for long enough."""
    seen, fed = dict[str, int](), set[str]()
    kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for row in rows:
        info = block.info(row)
        name = info.name.rpartition(":")[0]
        if name not in seen:
            kinds.setdefault((kind_of_expert(name), info.shape), []).append(name)
        if name not in seen or info.role == "update":
            seen[name] = row
        if info.role == "gradient" and is_alive[row]:
            fed.add(name)
    starved: dict[str, _Starved] = {}
    worker = int(block.worker[rows[0]])
    for names in kinds.values():
        learning = sum(name in fed for name in names)
        for name in names:
            key = f"{name}@{worker}"
            if name in fed:
                without.pop(key, None)
            elif learning:
                without[key] = min(without.get(key, 0) + 1, 1000)
                expert = expert_of(name)
                if without[key] >= records and expert not in starved:
                    starved[expert] = _Starved(seen[name], without[key], learning, len(names) - 1)
    return list(starved.values())
