"""Replay of a bundled JAX step: the recorded arguments are set, and the step is evaluated to its first bad operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from watchstep.format.bundle import Bundle
from watchstep.jax.replay.interpreter import StepEvaluation, evaluate_step
from watchstep.jax.replay.step_arguments import JaxStep, load_arguments
from watchstep.platform.terminal_text import printable


@dataclass(frozen=True)
class JaxReplay:
    """A replayed step.

    Attributes:
        name: of the bundle.
        step: number of the step.
        evaluation: results and the first bad operation.
        notes: what the reader must know besides the notes of the evaluation, as sentences.
    """

    name: str
    step: int
    evaluation: StepEvaluation
    notes: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether a result is NaN or infinite."""
        return self.evaluation.first_bad is not None

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        evaluation = self.evaluation
        return {
            "bundle": self.name,
            "framework": "jax",
            "step": self.step,
            "fails": self.fails,
            "first_bad": None if evaluation.first_bad is None else evaluation.first_bad.data(),
            "contained": evaluation.contained,
            "evaluated": evaluation.evaluated,
            "notes": [*self.notes, *evaluation.notes],
        }

    def _lines(self) -> Iterator[str]:
        yield printable(
            f"step {self.step} of {self.name}, JAX: {self.evaluation.evaluated} operations evaluated"
        )
        yield from (printable(f"note: {note}") for note in self.notes)
        if self.evaluation.first_bad is not None:
            yield str(self.evaluation.first_bad)
            return
        yield "all results are finite"
        yield from (printable(f"note: {note}") for note in self.evaluation.notes)


def replay_jax_step(bundle: Bundle, step: JaxStep) -> JaxReplay:
    """Evaluate a bundled step, operation by operation.

    Args:
        bundle: A bundle of a JAX step.
        step: The program's step.

    Raises:
        ConfigError: the bundle does not belong to the step.
        FormatError: the bundle is damaged.
    """
    arguments, keywords = load_arguments(bundle, step)
    evaluation = evaluate_step(step.function, *arguments, static_argnums=step.static_argnums, **keywords)
    notes = tuple(
        f"{each.path.removeprefix('arguments/')} is lost ({each.reason}): the replay has the value that the program builds"
        for each in bundle.document.lost
    )
    return JaxReplay(bundle.name, bundle.document.step, evaluation, notes)
