"""Objects with full tensors on a store, rows about them, and a rule over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.rules.runs import Event, Outcome, Rows, Watermark
from tests.sdk.format.blocks import Row, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.layout import SnapshotKey
from watchstep.format.snapshot import (
    DTYPES,
    Described,
    TensorPart,
    aligned_order,
    header,
    infos_metadata,
    parts_metadata,
)
from watchstep.format.tensors import Mode, SavedName, TensorInfo
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleMemory, judge_inputs
from watchstep_rules.engine.rule_inputs import (
    History,
    JudgingProgress,
    Lookback,
    RuleInputs,
    canonical,
    joined,
    over_one_catalogue,
    trimmed,
)
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Finding, Merge, Needs, Params, Rule, State, TensorNeeds, finding_at
from watchstep_rules.saved_block import SavedBlock

ATTEMPT = "a1"
OUTPUT = tensor("2:output", "activations", order=2, shape=(2, 2))
WEIGHT = tensor("0.weight", "weights", order=1, shape=(2, 2))
LOSS = tensor("loss", "losses", shape=())
NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}
Values = Mapping[TensorInfo, NDArray[Any]]


def encoded(
    values: Values,
    *,
    dtype: str | None = None,
    parts: Mapping[str, TensorPart] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """An object as recorders write it. ``dtype`` is the one of all tensors, whose bits the arrays are."""
    described = [
        Described(info.name, dtype or NAMES[array.dtype], array.shape) for info, array in values.items()
    ]
    arrays = list(values.values())
    order = aligned_order(described)
    given = {**parts_metadata(parts or {}), **infos_metadata(values), **(metadata or {})}
    start = header([described[place] for place in order], given)
    return start + b"".join(arrays[place].tobytes() for place in order)


def save(
    store: Store,
    step: int,
    values: Values,
    *,
    mode: Mode = "train",
    worker: int = 0,
    collection: str = "activations",
    attempt: str = ATTEMPT,
    **more: Any,
) -> None:
    """Put the object of a collection at a step onto the store of its run."""
    key = SnapshotKey(attempt, worker, step, mode, collection)
    store.put(key.path, encoded(values, **more))


def mark(
    step: int,
    learned: int | None = None,
    *,
    mode: Mode = "train",
    worker: int = 0,
    collection: str = "activations",
    number: int = 0,
) -> Row:
    """The row about an object, at the step at which the recorder learned that it is on the store."""
    info = SavedName(mode, collection).info(number)
    return Row(step + 1 if learned is None else learned, info, [float(step)], "global", worker)


class AwayParams(Params):
    """Parameters of `Away`."""

    factor: float = 2.0
    before: int = 0
    merge: Merge = "per_worker"
    modes: tuple[Mode, ...] = ("train",)
    collections: tuple[str, ...] = ("activations",)
    roles: tuple[str, ...] = ()
    reference: str = ""
    every: int = 10


class AwayState(State):
    """Judged rows by series, and the sum of their values."""

    judged: dict[str, tuple[int, float]] = {}  # noqa: RUF012 - pydantic copies it


class Away(Rule[AwayParams, AwayState]):
    """Fires where the sum of a tensor's magnitudes exceeds that of its last saved values, or of the reference run, times a factor."""

    name = "away"
    summary = "a tensor is far away from its earlier values"
    needs = Needs(collections=("activations",), tensors=TensorNeeds())
    merge = "per_worker"

    def lookback(self, params: AwayParams) -> int:
        return params.before

    def merged(self, params: AwayParams) -> Merge:
        return params.merge

    def reference(self, params: AwayParams) -> str:
        return params.reference

    def needed(self, params: AwayParams) -> Needs:
        tensors = TensorNeeds(params.every, params.modes, reference=bool(params.reference))
        return Needs(params.collections, params.roles, tensors=tensors)

    def evaluate(
        self, params: AwayParams, state: AwayState, context: Block, block: Block, now: int
    ) -> tuple[AwayState, list[Finding]]:
        assert isinstance(context, SavedBlock)
        assert isinstance(block, SavedBlock)
        earlier: dict[str, list[float]] = {}
        for row in range(len(context)):
            earlier.setdefault(series(context, row), []).append(size_of(context.values[row]))
        judged, findings = dict(state.judged), []
        for row in range(len(block)):
            key, size = series(block, row), size_of(block.values[row])
            before = earlier.setdefault(key, [])
            assert len(before) <= params.before + row
            reference = block.references[row]
            others = before[-params.before :] if params.before else [0.5]
            if params.reference:
                others = [] if reference is None else [size_of(reference)]
            if others and size > params.factor * max(others):
                findings.append(
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=size,
                        threshold=params.factor * max(others),
                        message=f"{block.info(row).name} has {size:g}, before {others}",
                    )
                )
            before.append(size)
            count, total = judged.get(key, (0, 0.0))
            judged[key] = (count + 1, total + size)
        return AwayState(judged=judged), findings


def series(block: Block, row: int) -> str:
    """A name of a row's series."""
    return f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}"


def size_of(values: NDArray[Any]) -> float:
    """The sum of magnitudes."""
    return float(np.abs(values.astype(np.float64)).sum())


@contextmanager
def registered() -> Iterator[None]:
    """`Away` is one of the rules within the ``with`` block."""
    RULES[Away.name] = Away()
    try:
        yield
    finally:
        del RULES[Away.name]


def away(**fields: Any) -> RuleConfig:
    """A config of `Away`: parameters, and fields of rule configs."""
    own = {name: fields.pop(name) for name in list(fields) if name in AwayParams.model_fields}
    return RuleConfig.model_validate({"rule": Away.name, "params": own, **fields})


@dataclass
class Evaluations:
    """Evaluates a run as the service does, with a reader of full tensors for each evaluation."""

    reader: Callable[[], SavedTensors]

    def follow(self, config: RuleConfig, evaluations: Sequence[Sequence[Event]]) -> Outcome:
        """Evaluate; each evaluation takes some events, and moves the watermark once."""
        return self.follow_all([config], evaluations)[0]

    def follow_all(
        self, configs: Sequence[RuleConfig], evaluations: Sequence[Sequence[Event]]
    ) -> list[Outcome]:
        """Evaluate several rule configs together."""
        outcomes = [Outcome(RuleMemory(), [], []) for _ in configs]
        history, before, lookback = History.empty(), -1, Lookback.of(configs)
        for number, events in enumerate(evaluations):
            blocks = [canonical(event.block) for event in events if isinstance(event, Rows)]
            arrived = concatenate(blocks) if blocks else Block.empty()
            now = max([before, *(event.step for event in events if isinstance(event, Watermark))])
            rows = RuleInputs(
                *over_one_catalogue(history.block, arrived), JudgingProgress(before, now, 7), self.reader()
            )
            for index, config in enumerate(configs):
                outcome = outcomes[index]
                verdict = judge_inputs(config, outcome.memory, rows)
                memory = RuleMemory.model_validate_json(verdict.memory.model_dump_json())
                findings = [*outcome.findings, *verdict.findings]
                outcomes[index] = Outcome(memory, findings, outcome.transitions + verdict.transitions)
            history = trimmed(joined([(number, arrived)], history), lookback, now)
            before = now
        return outcomes


def evaluations_of(store: Store, **more: Any) -> Evaluations:
    """Evaluations of an attempt on a store."""
    return Evaluations(lambda: SavedTensors(store, ATTEMPT, **more))
