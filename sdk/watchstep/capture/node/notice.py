"""Words that the parts of a node's writer share: what an object holds, and what is told before and after it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from watchstep.layout import SegmentKey

Blocks = Mapping[str, tuple[int, ...]]
"""Process → numbers of its blocks, ascending. A process is named by a token that it draws, a block by its own count."""


@dataclass(frozen=True)
class Notice:
    """Said to every follower before an object is made.

    Attributes:
        key: the object's name.
        blocks: what will be in it.
        term: what the lock file held when this was said: see `Handing.may_inherit`.
    """

    key: SegmentKey
    blocks: Blocks
    term: str


@dataclass(frozen=True)
class Doubt:
    """Blocks that may be on the store: somebody meant to make an object of them, and was not heard of again.

    Attributes:
        key: the object's name.
        token: whose blocks.
        numbers: which ones; the oldest that the process holds.
    """

    key: SegmentKey
    token: str
    numbers: tuple[int, ...]
