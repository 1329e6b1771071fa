"""What the messages of production are called, and the queues that they go by."""

from __future__ import annotations

EVALUATE = "watchstep.evaluate"
DISPATCH = "watchstep.dispatch"
BACKTEST = "watchstep.backtest"
SWEEP = "watchstep.sweep"
UPKEEP = "watchstep.upkeep"
QUEUE = "watchstep"
URGENT = "watchstep.urgent"
"""Of actions, stops among them: workers that are behind with evaluations take from it in turn with the others."""


def queue_of(worker: str) -> str:
    """The queue that only one worker takes messages from, beside the one of all."""
    return f"{QUEUE}.{worker}"
