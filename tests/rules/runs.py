"""Runs as a rule receives them: rows in segments of whole steps, increasing watermarks, and ways to split both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Protocol

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import Mode, Placement
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.judge import RuleMemory, judge
from watchstep_rules.engine.rule_inputs import JudgingProgress
from watchstep_rules.rule import Finding


@dataclass(frozen=True)
class Rows:
    """The rows of a segment arrive."""

    block: Block


@dataclass(frozen=True)
class Watermark:
    """The watermark passes steps up to this one."""

    step: int


Event = Rows | Watermark


@dataclass(frozen=True)
class Outcome:
    """The results of a rule config for a run."""

    memory: RuleMemory
    findings: list[Finding]
    transitions: list[Transition]

    @property
    def notified(self) -> list[Transition]:
        """The changes with notifications: firing, with the revised finding, and resolved."""
        phases = (Phase.FIRING, Phase.RESOLVED)
        return [change for change in coalesce(self.transitions) if change.phase in phases]


def follow(
    config: RuleConfig, evaluations: Sequence[Sequence[Event]], memory: RuleMemory | None = None
) -> Outcome:
    """Evaluate a run as the service does: each evaluation takes some events, and moves the watermark once."""
    memory = memory or RuleMemory()
    outcome = Outcome(memory, [], [])
    history, before = Block.empty(), -1
    for events in evaluations:
        arrived = concatenate([event.block for event in events if isinstance(event, Rows)])
        if not config.implementation.needed(config.parameters).histograms:
            arrived = arrived.without_histograms()
        now = max([before, *(event.step for event in events if isinstance(event, Watermark))])
        verdict = judge(config, memory, history, arrived, JudgingProgress(before, now, 7))
        # Memory lies in a database between evaluations, as JSON.
        memory = RuleMemory.model_validate_json(verdict.memory.model_dump_json())
        assert memory == verdict.memory
        outcome = Outcome(
            memory, [*outcome.findings, *verdict.findings], outcome.transitions + verdict.transitions
        )
        history, before = trimmed(config, concatenate([history, arrived]), now), now
    return outcome


def trimmed(config: RuleConfig, history: Block, watermark: int) -> Block:
    """No more of the history than the contract promises."""
    lookback = config.implementation.lookback(config.parameters)
    waiting = history.step > watermark
    if config.implementation.merged(config.parameters) == "per_worker":
        return history.tail(lookback)
    rows = np.arange(len(history))
    done = rows[~waiting][np.argsort(history.step[~waiting], kind="stable")]
    past = history.take(done)
    sharded = past.places.shard_count > 1
    within_lookback = [
        past.where(~sharded).tail(lookback),
        past.where(sharded & of_last_steps(past, lookback)),
    ]
    return concatenate([*within_lookback, history.where(waiting)])


def of_last_steps(block: Block, steps: int) -> NDArray[np.bool_]:
    """Which rows are of the last steps of their tensor, whichever shard they are of."""
    seen: dict[tuple[int, ...], set[int]] = {}
    keys = list(
        zip(*(column.tolist() for column in (block.tensor, block.mode, block.places.replica)), strict=True)
    )
    for key, step in zip(keys, block.step.tolist(), strict=True):
        seen.setdefault(key, set()).add(step)
    last_steps = {key: set(sorted(steps_seen)[-steps:] if steps else []) for key, steps_seen in seen.items()}
    return np.array(
        [step in last_steps[key] for key, step in zip(keys, block.step.tolist(), strict=True)], np.bool_
    )


def all_at_once(config: RuleConfig, block: Block) -> Outcome:
    """Judge a whole run in one evaluation."""
    return follow(config, [[Rows(block), Watermark(int(block.step.max()) if len(block) else -1)]])


def steps_of(outcome: Outcome, name: str) -> list[int]:
    """At which steps a tensor had findings."""
    return [finding.step for finding in outcome.findings if finding.tensor == name]


class FoundSteps(Protocol):
    """The steps of a rule's findings in a whole run, in their order."""

    def __call__(self, block: Block, **params: object) -> list[int]: ...


def found_by(rule: str, name: str = "") -> FoundSteps:
    """Return a function that judges a run by a rule with any parameters, and counts findings of one tensor or of all."""

    def found(block: Block, **params: object) -> list[int]:
        findings = all_at_once(RuleConfig(rule=rule, params=params), block).findings
        return [finding.step for finding in findings if name in ("", finding.tensor)]

    return found


def first_message(rule: str, block: Block, **params: object) -> str:
    """The message of a rule's first finding in a whole run."""
    return all_at_once(RuleConfig(rule=rule, params=params), block).findings[0].message


def one_by_one(block: Block) -> list[list[Event]]:
    """The events of a run in which every step is an evaluation of its own."""
    return [
        [Rows(block.where(block.step == step)), Watermark(step)]
        for step in range(int(block.step.max(initial=-1)) + 1)
    ]


def norms(
    name: str, values: Sequence[float], *, first: int = 0, shape: tuple[int, ...] = (8, 8)
) -> list[Row]:
    """A layer's gradient with one element a step, so that its norm and its mean magnitude are that."""
    info = gradient(name, shape=shape)
    return [Row(first + step, info, [value]) for step, value in enumerate(values)]


def in_steps(*layers: list[Row]) -> Block:
    """Layers of one worker, step by step."""
    return block_of(sorted((row for layer in layers for row in layer), key=lambda row: row.step))


INFOS = (
    gradient("first", order=1),
    gradient("second", order=2),
    gradient("bias", order=2, shape=(8,)),
    tensor("loss", "losses", shape=()),
    tensor("first.weight", "weights", order=1),
    tensor("first.bias", "biases", order=1, shape=(8,)),
    tensor("second.output", "activations", order=2),
    tensor("first.weight:update", "updates", order=1),
    tensor("second.weight:update", "updates", order=2),
    replace(tensor("act:output", "activations", order=1), module_type="Tanh"),
    tensor("labels", "labels", shape=(8,)),
    tensor("first.weight:checksum", "checksums", order=1, shape=()),
    tensor("gradient_scaler:scale", "metrics", shape=()),
    tensor("gradient_scaler:skipped", "metrics", shape=()),
    tensor("model:input", "inputs", shape=(2, 1, 1, 1)),
    tensor("gradients:stale", "metrics", shape=()),
    tensor("optimizer:learning_rate/0", "metrics", shape=()),
    tensor("optimizer:weight_decay/0", "metrics", shape=()),
    tensor("optimizer:has_state", "metrics", shape=()),
    replace(tensor("norm.running_var", "buffers", order=2, shape=(8,)), module_type="BatchNorm1d"),
    tensor("first.weight:not_in_optimizer", "not_in_optimizer", role="not_in_optimizer", order=1),
    tensor("confusion/1", "confusion", role="confusion", shape=()),
    tensor("tree_depth", "custom", role="tree_depth"),
    tensor("feature_importance/weight", "custom", role="feature_importance"),
    tensor("system/gpu_0", "system", role="system", shape=()),
    tensor("system/gpu_0_memory", "system", role="system", shape=()),
    tensor("system/node_cpu", "system", role="system", shape=()),
    tensor("system/memory_private", "system", role="system", shape=()),
    tensor("system/step_seconds", "system", role="system", shape=()),
    tensor("system/data_wait", "system", role="system", shape=()),
)
LAST = 24
ODD = (0.0, 1e-12, 1e9, float("nan"), float("inf"), float("-inf"))


def elements(random: Random) -> list[float]:
    """A few elements: mostly ordinary, sometimes tiny, huge or not finite, so that rules have findings."""
    scale = random.choice([1.0, 1.0, 1.0, 3e-9, 1e3])
    return [
        random.choice(ODD) if random.random() < 0.15 else scale * random.gauss(0, 1)
        for _ in range(random.randint(0, 3))
    ]


def elements_of(name: str, random: Random) -> list[float]:
    """The same; of a running variance mostly what it begins with."""
    return [1.0] if "running_var" in name and random.random() < 0.7 else elements(random)


def figures(random: Random) -> dict[str, float]:
    """Probe values for any row; a rule reads those that it needs."""
    channels = random.choice([2.0, 8.0])
    return {
        "channels": channels,
        "dead_channels": random.choice([0.0, channels, channels]),
        "saturated_channels": random.choice([0.0, channels, float("nan")]),
        "update_ratio": random.choice([0.0, 0.0, 1e-3, float("nan")]),
        "labels_counted": random.choice([100.0, 300.0, 900.0]),
        "classes": random.choice([2.0, 2.0, 3.0, float("nan")]),
        "largest_class": random.choice([60.0, 250.0]),
        "smallest_class": random.choice([1.0, 40.0]),
        "rarest_class": 1.0,
        "unit_spread": random.choice([0.0, 1.0, float("nan")]),
        "unit_movement": random.choice([0.0, 1.0]),
        "training": random.choice([0.0, 0.0, 1.0]),
        "model_training": random.choice([0.0, 0.0, 1.0]),
        "learns": random.choice([0.0, 1.0, 1.0]),
        "batches_tracked": random.choice([0.0, 100.0]),
        "changed": random.choice([0.0, 0.0, 1.0]),
        "was_optimized": random.choice([0.0, 1.0]),
        "optimized_share": random.choice([0.0, 0.5]),
        "token_share": random.choice([0.1, 0.9, 0.9, float("nan")]),
        "top_token_share": random.choice([0.1, 0.9]),
        "examples": random.choice([10.0, 50.0]),
        "correct": random.choice([2.0, 10.0]),
        "confused": random.choice([0.0, 5.0]),
        "top_share_3": random.choice([0.5, 0.9, float("nan")]),
        "confused_with": random.choice([3.0, float("nan")]),
        **elements_tested(random),
    }


def elements_tested(random: Random) -> dict[str, float]:
    """Values of probes with arguments for any row, as rules with `eager` parameters request them."""
    units = random.choice([2.0, 8.0])
    return {
        "units": units,
        "inactive_units:1.0": random.choice([0.0, units]),
        "saturated_units:Tanh:-9.4999:9.4999:1.0": random.choice([0.0, units]),
        "saturated_units:Sigmoid:-23.0:16.99999:1.0": random.choice([0.0, units]),
        "unchanged:1e-05:1e-08:False": random.choice([0.0, 1.0, 1.0]),
        "weight_change:2:1e-09": random.choice([-1.0, 0.0, 1.0, 100.0]),
        "token_count:0": random.choice([0.0, 8.0]),
        "tokens_counted": 10.0,
        "channel_sum:1:0": random.choice([0.0, 4.0]),
        "input_variance": random.choice([0.0, 1.0, 20.0, float("nan")]),
        "percentile_range:2": random.choice([1e-4, 1.0, float("nan")]),
        "all_examples": random.choice([10.0, 50.0]),
        "all_correct": random.choice([2.0, 10.0]),
        "all_predicted": random.choice([0.0, 10.0]),
        "all_mistaken": random.choice([0.0, 5.0]),
        "all_mistaken_for": random.choice([3.0, float("nan")]),
        "largest_node": random.choice([0.0, 100.0]),
    }


def segments(random: Random, worker: int, sharded: frozenset[str]) -> list[Block]:
    """One worker's segments: irregular steps, ascending, each whole, in a few segments."""
    steps: list[list[Row]] = []
    for step in sorted(random.sample(range(LAST + 1), random.randint(1, LAST))):
        mode: Mode = "eval" if random.random() < 0.2 else "train"
        named = random.sample(INFOS, random.randint(1, len(INFOS)))
        places = [Placement(worker, 2) if info.name in sharded else Placement() for info in named]
        pairs = zip(named, places, strict=True)
        steps.append(
            [
                Row(step, info, elements_of(info.name, random), mode, worker, place, figures(random))
                for info, place in pairs
            ]
        )
    cuts = sorted({0, len(steps), *random.choices(range(len(steps)), k=3)})
    return [block_of([row for step in steps[start:end] for row in step]) for start, end in pairwise(cuts)]


@st.composite
def runs(draw: st.DrawFn) -> list[Event]:
    """A run of two workers: their segments interleaved, in order for each worker, and watermarks at any points.

    A seal may pass a step whose rows come later: of a worker that was given up, and came back.
    """
    random = Random(draw(st.integers(0, 2**32)))
    sharded = frozenset(info.name for info in INFOS if random.random() < 0.4)
    queues = [segments(random, worker, sharded) for worker in (0, 1)]
    events: list[Event] = []
    watermarks = sorted(random.sample(range(LAST), random.randint(0, 4)), reverse=True)
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        events.append(Rows(queue.pop(0)))
        if watermarks and random.random() < 0.5:
            events.append(Watermark(watermarks.pop()))
    return [*events, *(Watermark(step) for step in reversed(watermarks)), Watermark(LAST)]


@st.composite
def splits(draw: st.DrawFn, events: list[Event]) -> list[list[Event]]:
    """The same events in evaluations, as long or short as may be.

    An evaluation ends with a watermark, so rows that arrive after the watermark of their step begin another evaluation.
    """
    parts: list[list[Event]] = [[]]
    watermark = -1
    for event in events:
        late = isinstance(event, Rows) and bool((event.block.step <= watermark).any())
        if parts[-1] and (late or draw(st.booleans())):
            parts.append([])
        parts[-1].append(event)
        watermark = max(watermark, event.step) if isinstance(event, Watermark) else watermark
    return parts
