"""Output of pods is read on where it was left, line by line, whatever the API's clock and cuts are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep_launch.backends.kubernetes import states as kubernetes_logs
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError
from watchstep_launch.backends.kubernetes.states import read_logs


class Kept:
    """Output as a kubelet keeps it: each line with its time; asked for from a second on, it gives that second whole."""

    def __init__(self, logs: dict[str, list[tuple[str, bytes]]], piece: int = 7) -> None:
        self.logs = logs
        self.piece = piece
        self.gone: set[str] = set()

    @contextmanager
    def stream(self, path: str, **query: str) -> Iterator[Iterator[bytes]]:
        name = path.split("/")[-2]
        if name in self.gone:
            raise KubernetesRefusedError(404, "NotFound", "gone")
        since = query.get("sinceTime", "")[:19]
        data = b"".join(time.encode() + b" " + line for time, line in self.logs[name] if time[:19] >= since)
        yield (data[start : start + self.piece] for start in range(0, len(data), self.piece))


def pod(name: str, *, phase: str = "Running", number: int = 0) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "creationTimestamp": f"2026-01-01T00:00:{number:02d}Z",
        },
        "spec": {"containers": [{"name": "main"}]},
        "status": {"phase": phase},
    }


def stamp(number: int) -> str:
    """Times that repeat, some without a fraction, as RFC3339Nano writes them."""
    fraction = "" if number % 5 == 0 else f".{number % 5}"
    return f"2026-01-01T00:00:{number // 5 % 60:02d}{fraction}Z"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=6)), max_size=25),
    st.lists(st.integers(0, 25), max_size=6),
    st.integers(1, 40),
    st.booleans(),
)
def test_what_was_read_in_parts_is_what_was_written(
    written: list[tuple[int, bytes]], looks: list[int], piece: int, open_end: bool
) -> None:
    at, lines = 0, []
    for step, text in written:
        at += step
        lines.append((stamp(at), text.replace(b"\n", b"") + b"\n"))
    if lines and open_end:
        lines[-1] = (lines[-1][0], lines[-1][1].rstrip(b"\n"))
    whole = b"".join(line for _, line in lines)
    kept, data, cursor = Kept({"a": []}, piece), b"", ""
    for seen in sorted(looks):
        kept.logs["a"] = lines[:seen]
        part = read_logs(kept, [pod("a")], cursor)  # type: ignore[arg-type]
        data, cursor = data + part.data, part.cursor
    kept.logs["a"] = lines
    while (part := read_logs(kept, [pod("a", phase="Failed")], cursor)).data:  # type: ignore[arg-type]
        data, cursor = data + part.data, part.cursor
    assert data == whole


def test_pods_follow_each_other_and_one_that_is_gone_is_passed_over() -> None:
    kept = Kept({name: [(stamp(1), name.encode() + b"\n")] for name in ("second", "first", "third")})
    pods = [pod("second", number=2), pod("first", number=1), pod("third", number=3)]
    part = read_logs(kept, pods, "")  # type: ignore[arg-type]
    assert part.data == b"first\nsecond\nthird\n"
    kept.gone = {"first"}
    kept.logs["second"].append((stamp(2), b"more\n"))
    again = read_logs(kept, pods, part.cursor)  # type: ignore[arg-type]
    assert again.data == b"more\n"
    assert read_logs(kept, [pods[2]], again.cursor).data == b""  # type: ignore[arg-type]
    assert "uid-first" not in read_logs(kept, [pods[2]], again.cursor).cursor  # type: ignore[arg-type]


def test_much_of_one_second_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_logs, "LARGEST_PART", 50)
    lines = [(stamp(0), b"%04d\n" % number) for number in range(100)]
    kept, data, cursor, parts = Kept({"a": lines}), b"", "", 0
    while (part := read_logs(kept, [pod("a")], cursor)).data:  # type: ignore[arg-type]
        data, cursor, parts = data + part.data, part.cursor, parts + 1
    assert data == b"".join(line for _, line in lines)
    assert parts == 10


@pytest.mark.parametrize("cursor", ["", "12", "[1]", "{", '{"a": 1}', '{"a": ["x", "y"]}'])
def test_a_cursor_of_another_kind_begins_anew(cursor: str) -> None:
    kept = Kept({"a": [(stamp(1), b"line\n")]})
    assert read_logs(kept, [pod("a")], cursor).data == b"line\n"  # type: ignore[arg-type]
