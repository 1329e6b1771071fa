"""Small objects that claim to be large are refused within the bound on memory, whatever kind they are of."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz_objects.__main__ import MIB, children, run_child
from benchmarks.fuzz_objects.whole import KINDS, record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with whole objects, as the fuzzer's children read it."""
    folder = tmp_path_factory.mktemp("objects")
    for kind, whole in record(folder / "recorded").items():
        (folder / kind).mkdir()
        for number, data in enumerate(whole):
            (folder / kind / f"{number:04d}").write_bytes(data)
    return folder


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_small_objects_that_claim_to_be_large_are_refused_within_the_bound(recorded: Path, kind: str) -> None:
    _, _, outcome = run_child(recorded, kind, 0, 0)
    assert not isinstance(outcome, str), outcome
    assert outcome["failures"] == []
    assert int(str(outcome["refused"])) > 0
    assert outcome["read"] == 0 or kind in {"segment", "snapshot", "control"}, (
        "their limits leave some of these small enough, and readers of segments do not use every number"
    )
    assert int(str(outcome["peak"])) - int(str(outcome["before"])) < MIB


def test_runs_of_different_seeds_try_different_objects() -> None:
    first, again, other = ({(kind, seed) for kind, seed, _ in children(30_000, run)} for run in (0, 0, 1))
    assert first == again
    assert len(first) == len(other) > len(KINDS)
    assert not first & other
