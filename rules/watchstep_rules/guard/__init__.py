"""Rules inside the training process: the same rule objects, on the rows as they are measured."""

from watchstep_rules.guard.guard import Guard

__all__ = ["Guard"]
