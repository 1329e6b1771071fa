"""Rows of the system, as a sampler gives them, by their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block

SAMPLES = 20
"""In a row: ten seconds of them."""

Samples = Sequence[float]
Course = Callable[[int], Samples | float]
"""The samples of the n-th row; one number stands for a row of equal ones."""


def system_rows(
    figures: Mapping[str, Course | float], rows: int, worker: int = 0, every: int = 10
) -> list[Row]:
    """So many rows of each figure, one every so many steps."""
    blocks = []
    for number in range(rows):
        for name, course in sorted(figures.items()):
            values = course(number) if callable(course) else course
            if isinstance(values, float | int):
                values = [float(values)] * SAMPLES
            if values:
                info = tensor(name, "system", role="system", shape=())
                blocks.append(Row(every * number, info, values, "global", worker))
    return blocks


def system_run(*workers: Mapping[str, Course | float], rows: int) -> Block:
    """A run of these workers."""
    all_rows = [row for worker, figures in enumerate(workers) for row in system_rows(figures, rows, worker)]
    return block_of(sorted(all_rows, key=lambda row: (row.step, row.worker)))
