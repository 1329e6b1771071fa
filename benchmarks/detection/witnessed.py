"""Programs that measure their own quality: difficult healthy trainings, and faults that begin in the middle of one.

A healthy program states what it reaches (`Training.improves`), so that a program that does not learn cannot pass for a
healthy one. A program with a fault runs twice, sound and faulty, and states a bound that only the sound one meets
(`Training.separates`), so that a fault that does no harm cannot pass for one.

Each program belongs to one half, by a hash of its name, which nobody tunes; each half has seeds of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.detection.own import Part
from watchstep import Hook

Kind = Literal["difficult", "mid_run"]
Better = Literal["lower", "higher"]

SEEDS: dict[Part, tuple[int, ...]] = {"tune": (0, 1), "held_out": (10, 11, 12, 13)}
"""Of each half; no seed is in both."""


@dataclass(frozen=True)
class Quality:
    """What a training reached by a measure of its own.

    Attributes:
        name: of the measure.
        before: at the beginning, or at the onset of a fault; None where nothing was measured there.
        after: at the end.
        expected: whether the end is as the program says it must be.
        words: what it says, for people.
    """

    name: str
    before: float | None
    after: float
    expected: bool
    words: str


class Training:
    """One training of a program, as it is recorded.

    Attributes:
        seed: of the program.
        faulty: whether its fault is to begin; False for its sound twin, and for a healthy program.
        hook: records it.
        qualities: what it has measured of itself.
        store: a folder for the program's own files.
        rank: of this process, among ``ranks``.
        ranks: processes that train together.
    """

    def __init__(  # noqa: PLR0913 - what the harness gives; all but three by name
        self,
        seed: int,
        open_hook: Callable[[int], Hook],
        step_done: Callable[[], None],
        *,
        faulty: bool = False,
        store: str = "",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.seed, self.faulty, self.store = seed, faulty, store
        self.rank, self.ranks = rank, ranks
        self.hook = open_hook(0)
        self.qualities: list[Quality] = []
        self._open_hook, self._step_done = open_hook, step_done

    def generator(self, offset: int = 0) -> torch.Generator:
        """A generator for data, apart from the one of weights and dropout."""
        return torch.Generator().manual_seed(9_000 + 97 * self.seed + offset)

    def watch(self, model: Any, optimizer: Any = None, **options: Any) -> None:
        """As `Hook.watch`."""
        self.hook.watch(model, optimizer, **options)

    def log(self, *, mode: Any = None, **scalars: Any) -> None:
        """As `Hook.log`."""
        self.hook.log(mode=mode, **scalars)

    def record(self, **given: Any) -> None:
        """As `Hook.record`."""
        self.hook.record(**given)

    def step(self) -> None:
        """A step of the program's own work is done: the fixed clock goes on."""
        self._step_done()

    def resume(self, first_step: int) -> None:
        """Go on as a new attempt of the run, as a process that was started again does."""
        self.hook.close()
        self.hook = self._open_hook(first_step)

    def improves(
        self,
        name: str,
        before: float | None,
        after: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """State that a measure of a healthy training ends within a bound, and better than it began."""
        bound, better = _bound(at_most, at_least)
        expected = _meets(after, bound, better) and (before is None or _meets(after, before, better))
        self._add(
            name, before, after, expected, f"{'at most' if better == 'lower' else 'at least'} {bound:g}"
        )

    def separates(
        self,
        name: str,
        before: float | None,
        after: float,
        *,
        sound_at_most: float | None = None,
        sound_at_least: float | None = None,
    ) -> None:
        """State a bound that the sound training meets at its end, and the faulty one does not."""
        bound, better = _bound(sound_at_most, sound_at_least)
        expected = _meets(after, bound, better) != self.faulty
        word = "at most" if better == "lower" else "at least"
        self._add(name, before, after, expected, f"sound: {word} {bound:g}")

    def _add(self, name: str, before: float | None, after: float, expected: bool, bound: str) -> None:
        first = "" if before is None else f"{float(before):.4g} → "
        words = f"{name} {first}{float(after):.4g} ({bound})"
        self.qualities.append(Quality(name, before, float(after), expected, words))


@dataclass(frozen=True)
class Witnessed:
    """One program.

    Attributes:
        name: its id, which decides its half.
        train: the training.
        kind: a difficult healthy program, or one with a fault that begins in the middle.
        why: why it looks odd, or what the fault is.
        ranks: processes that train together.
        onset: the first step at which the fault can be seen.
        accepted: rules of which any is right about the fault.
    """

    name: str
    train: Callable[[Training], None]
    kind: Kind
    why: str
    ranks: int = 1
    onset: int = 0
    accepted: frozenset[str] = frozenset()

    @property
    def half(self) -> Part:
        """The half it belongs to."""
        return half_of(self.name)


def half_of(name: str) -> Part:
    """The half of a program: by the lowest bit of a hash of its name."""
    return "held_out" if hashlib.sha256(name.encode()).digest()[0] & 1 else "tune"


DIFFICULT: dict[str, Witnessed] = {}
MID_RUN: dict[str, Witnessed] = {}
"""By name; filled as the modules are imported."""

Register = Callable[[Callable[[Training], None]], Callable[[Training], None]]


def difficult(name: str, why: str, *, ranks: int = 1) -> Register:
    """Register a healthy program that is difficult to judge."""

    def register(train: Callable[[Training], None]) -> Callable[[Training], None]:
        _add_to(DIFFICULT, Witnessed(name, train, "difficult", why, ranks))
        return train

    return register


def mid_run(name: str, fault: str, onset: int, accepted: set[str] | frozenset[str]) -> Register:
    """Register a program whose fault begins at step ``onset`` where `Training.faulty` is set."""

    def register(train: Callable[[Training], None]) -> Callable[[Training], None]:
        _add_to(MID_RUN, Witnessed(name, train, "mid_run", fault, 1, onset, frozenset(accepted)))
        return train

    return register


def witnessed_programs() -> dict[str, Witnessed]:
    """All of them by name."""
    from benchmarks.detection import difficult as difficult_programs
    from benchmarks.detection import mid_run as faults

    return {**difficult_programs.PROGRAMS, **faults.PROGRAMS}


def _add_to(programs: dict[str, Witnessed], program: Witnessed) -> None:
    if program.name in DIFFICULT or program.name in MID_RUN:
        raise ValueError(f"two programs are named {program.name}")
    programs[program.name] = program


def _bound(at_most: float | None, at_least: float | None) -> tuple[float, Better]:
    if (at_most is None) == (at_least is None):
        raise ValueError("a measure needs one bound: at most, or at least")
    return (at_most, "lower") if at_most is not None else (float(at_least or 0.0), "higher")


def _meets(value: float, bound: float, better: Better) -> bool:
    if not math.isfinite(value):
        return False
    return value <= bound if better == "lower" else value >= bound
