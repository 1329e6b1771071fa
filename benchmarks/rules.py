"""How fast the rules judge a run of 500 tensors and 10,000 steps, all of them together.

``python -m benchmarks.rules [--quick] [--json FILE]``. Every rule over statistics judges, those that are off by default too,
each with its default parameters. Rows come as a service gets them, so many steps to a block, with the history that it
keeps; and all in one block, as a backtest takes them. Of one process' time on one core only the judging counts, state in
and out as data included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.made_rows import Shape, catalogue_of, rows_of_steps
from benchmarks.report import Figure, Report, arguments
from watchstep.format.block import Block, concatenate
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleMemory, judge_inputs
from watchstep_rules.engine.rule_inputs import History, JudgingProgress, Lookback, RuleInputs, trimmed
from watchstep_rules.registry import RULES

STEPS = 10_000
STEPS_OF_A_BLOCK = 200
WORKERS = 8
TARGET_ROWS = 1e6
TARGET_STATE = 128


@dataclass
class Judged:
    """What judging took.

    Attributes:
        rows: that were judged.
        seconds: of the process' time, by what it went to: a rule, or the front part that all share.
        state: bytes of each rule's state as JSON, at the end.
        findings: of all rules.
        peak: MiB that the process held at most.
        held: MiB that it held before, with all rows where they are judged in one block.
    """

    rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    findings: int = 0
    peak: float = 0.0
    held: float = 0.0

    def spent(self, what: str, since: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - since


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def configs() -> list[RuleConfig]:
    """Every rule over statistics, by its defaults, but for those that judge a figure of elements, which the made rows lack."""
    every = [RuleConfig(rule=name) for name, rule in RULES.items() if not rule.clock]
    return [config for config in every if not _judges_elements(config)]


def _judges_elements(config: RuleConfig) -> bool:
    """Whether it needs a probe with parameters, such as a share of elements below a threshold."""
    return any(":" in probe for probe in config.implementation.needed(config.parameters).probes)


def judge_blocks(blocks: Iterator[Block], chosen: Sequence[RuleConfig]) -> Judged:
    """As the evaluator does: history, what arrived, seals after each block."""
    judged = Judged(held=_resident())
    reach = Lookback.of(chosen)
    memories = {config.name: RuleMemory() for config in chosen}
    history, before = History.empty(), -1
    for arrived in blocks:
        judged.rows += len(arrived)
        now = int(arrived.step.max())
        since = time.process_time()
        rows = RuleInputs(history.block, arrived, JudgingProgress(before, now, int(arrived.time_ns.max())))
        judged.spent("(shared)", since)
        for config in chosen:
            since = time.process_time()
            verdict = judge_inputs(config, memories[config.name], rows)
            judged.spent(config.name, since)
            memories[config.name] = verdict.memory
            judged.findings += len(verdict.findings)
            if verdict.memory.problem:
                raise RuntimeError(f"{config.name}: {verdict.memory.problem}")
        together = concatenate([history.block, arrived])
        history = trimmed(History(together, np.zeros(len(together), np.int64)), reach, now)
        before = now
    judged.peak = _resident()
    judged.state = {
        name: len(json.dumps(memory.state, separators=(",", ":"))) if memory.state else 0
        for name, memory in memories.items()
    }
    return judged


def measure(workers: int, steps: int, steps_of_a_block: int) -> Judged:
    """One way, in this process."""
    shape = Shape(workers=workers)
    made: Iterator[Block] = (
        rows_of_steps(shape, first, min(steps_of_a_block, steps - first))
        for first in range(0, steps, steps_of_a_block)
    )
    if steps_of_a_block == steps:
        made = iter(list(made))
    return judge_blocks(made, configs())


def _apart(workers: int, steps: int, steps_of_a_block: int) -> Judged:
    """The same in a process of its own, for its memory's sake."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rules", "--way", f"{workers},{steps},{steps_of_a_block}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Judged(**json.loads(done.stdout))


def add(report: Report, way: str, judged: Judged, tensors: int) -> None:
    whole = sum(judged.seconds.values())
    note = f"{judged.rows} rows, {whole:.3g} s, {len(judged.seconds) - 1} rules, {judged.findings} findings"
    report.add(
        f"all rules, {way}", Figure(judged.rows / whole, "rows/s", TARGET_ROWS, bound="at least", note=note)
    )
    report.add(f"memory, {way}", Figure(judged.peak, "MiB", note=f"{judged.held:.0f} before judging began"))
    slowest = sorted(judged.seconds.items(), key=lambda item: -item[1])
    report.remark(f"{way}, seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in slowest))
    most = max(judged.state, key=lambda name: judged.state[name])
    report.add(
        f"state of a rule, {way}",
        Figure(judged.state[most] / tensors, "B/tensor", TARGET_STATE, note=f"the most: {most}"),
    )


def main() -> None:
    parser = arguments("How fast the rules judge.")
    parser.add_argument("--way", help="workers,steps,steps of a block: print what one way takes, as JSON")
    parsed = parser.parse_args()
    if parsed.way:
        print(json.dumps(vars(measure(*map(int, parsed.way.split(","))))))
        return
    steps = 1_000 if parsed.quick else STEPS
    tensors = len(catalogue_of(Shape()))
    report = Report(f"Judging {tensors} tensors x {steps} steps", parsed.quick)
    blocks = f"blocks of {STEPS_OF_A_BLOCK} steps"
    add(report, blocks, _apart(1, steps, STEPS_OF_A_BLOCK), tensors)
    add(report, "one block", _apart(1, steps, steps), tensors)
    sharded = _apart(WORKERS, max(steps // WORKERS, STEPS_OF_A_BLOCK), STEPS_OF_A_BLOCK // WORKERS)
    add(report, f"{WORKERS} workers with shards", sharded, tensors)
    report.remark(
        "Putting rows in order and merging shards is charged to the first rule that waits for seals. State is that of all "
        "tensors as JSON, over the tensors of the run."
    )
    clocked = [name for name, rule in RULES.items() if rule.clock]
    judged = {config.rule for config in configs()}
    left_out = [name for name in RULES if name not in judged and name not in clocked]
    report.remark(
        f"Left out, for the rows lack the figures of elements that they judge: {', '.join(left_out)}."
    )
    report.finish(parsed.json)


if __name__ == "__main__":
    main()
