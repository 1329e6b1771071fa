"""The life of an alert: inactive → pending → firing → resolved, as data.

An alert belongs to one rule config on one attempt of a run. It is pending while some tensor has findings but not yet
for as many judged steps in a row as ``for`` asks; firing once one has; resolved when every tensor that made it fire
has been judged clean for as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from watchstep.block import Block
from watchstep_rules.finding import Finding


class Phase(str, Enum):
    """Where an alert stands."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class AlertMemory(BaseModel):
    """What is kept of an alert between blocks.

    Attributes:
        phase: where it stands.
        finding: the finding that made it fire; that of the likeliest cause among those of its step.
        hits: for each series (tensor@worker/mode) with a finding at its last judged step, how many in a row.
        clean: for each series that fires, judged steps without a finding since its last.
    """

    model_config = ConfigDict(frozen=True)

    phase: Phase = Phase.INACTIVE
    finding: Finding | None = None
    hits: dict[str, int] = Field(default_factory=dict)
    clean: dict[str, int] = Field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """A change of phase, and the step at which it came."""

    phase: Phase
    step: int
    finding: Finding | None


def advance(
    memory: AlertMemory, hold_steps: int, block: Block, findings: list[Finding]
) -> tuple[AlertMemory, list[Transition]]:
    """Follow an alert over a judged block.

    Args:
        memory: as the last call returned it.
        hold_steps: ``for: {steps}``.
        block: the judged rows, in the order in which they were judged.
        findings: what the rule said of them.
    """
    hits = {(f.step, f.worker, f.mode, f.tensor): f for f in findings}
    life = _Life(memory, hold_steps)
    rows: list[tuple[str, Finding | None]] = []
    place: tuple[int, int, int] | None = None
    for row in range(len(block)):
        here = (int(block.step[row]), int(block.worker[row]), int(block.mode[row]))
        if place is not None and here != place:
            life.judge(place[0], rows)
            rows = []
        place = here
        name, mode = block.info(row).name, block.mode_name(row)
        rows.append((f"{name}@{here[1]}/{mode}", hits.get((here[0], here[1], mode, name))))
    if place is not None:
        life.judge(place[0], rows)
    return life.memory(), life.transitions


class _Life:
    """One pass over the judged steps of a block."""

    def __init__(self, memory: AlertMemory, hold_steps: int) -> None:
        self._hold = hold_steps
        self._phase = memory.phase
        self._finding = memory.finding
        self._hits = dict(memory.hits)
        self._clean = dict(memory.clean)
        self.transitions: list[Transition] = []

    def memory(self) -> AlertMemory:
        return AlertMemory(phase=self._phase, finding=self._finding, hits=self._hits, clean=self._clean)

    def judge(self, step: int, rows: list[tuple[str, Finding | None]]) -> None:
        ripe: list[Finding] = []
        for series, finding in rows:
            if finding is None:
                self._hits.pop(series, None)
                if series in self._clean:
                    self._clean[series] += 1
                continue
            self._hits[series] = self._hits.get(series, 0) + 1
            if self._hits[series] >= self._hold:
                ripe.append(finding)
                self._clean[series] = 0
            elif series in self._clean:
                self._clean[series] = 0
        self._settle(step, ripe)

    def _settle(self, step: int, ripe: list[Finding]) -> None:
        if self._phase is Phase.FIRING:
            if all(clean >= self._hold for clean in self._clean.values()):
                self._clean = {}
                self._go(Phase.RESOLVED, step, self._finding)
        elif ripe:
            self._finding = min(ripe, key=lambda finding: finding.cause_rank)
            self._go(Phase.FIRING, step, self._finding)
        elif self._hits and self._phase is not Phase.PENDING:
            self._go(Phase.PENDING, step, None)
        elif not self._hits and self._phase is Phase.PENDING:
            self._go(Phase.INACTIVE, step, None)

    def _go(self, phase: Phase, step: int, finding: Finding | None) -> None:
        self._phase = phase
        self.transitions.append(Transition(phase, step, finding))
