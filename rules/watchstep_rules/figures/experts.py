"""Experts of a mixture, known by their names: ``layers.0.experts.3.up.weight``."""

from __future__ import annotations

import functools
import re

_EXPERT = re.compile(r"([^.]*expert[^.]*\.)\d+(\.)", re.IGNORECASE)


@functools.lru_cache(maxsize=1 << 14)
def kind_of_expert(name: str) -> str:
    """The name of an expert's tensor without the expert's number; empty where it is of none."""
    kind, experts = _EXPERT.subn(r"\1*\2", name)
    return kind if experts else ""


@functools.lru_cache(maxsize=1 << 14)
def expert_of(name: str) -> str:
    """The path of the expert that a tensor belongs to, the innermost; empty where it is of none."""
    ends = [found.end() for found in _EXPERT.finditer(name)]
    return name[: ends[-1] - 1] if ends else ""
