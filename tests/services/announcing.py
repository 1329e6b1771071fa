"""Bodies of announcements."""

from __future__ import annotations

from typing import Any

from watchstep.format.layout import SegmentKey

_OF_SEGMENT = frozenset({"node", "writer", "seq", "first", "last"})


def announcing(*keys: SegmentKey, **changes: Any) -> dict[str, Any]:
    """The body that announces segments of one attempt. Changes apply to the last segment or to the body."""
    segments = [
        {
            "node": key.writer.node, "writer": key.writer.writer, "seq": key.seq, "first": key.first, "last": key.last,
        }
        for key in keys
    ]  # fmt: skip
    segments[-1].update({name: value for name, value in changes.items() if name in _OF_SEGMENT})
    others = {name: value for name, value in changes.items() if name not in _OF_SEGMENT}
    return {"attempt": keys[0].writer.attempt, "segments": segments, **others}
