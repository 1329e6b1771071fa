"""A small campaign of the crash benchmark: the service's processes are killed, and nothing is lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.crash.__main__ import report_of
from benchmarks.crash.campaign import Wanted, running
from benchmarks.crash.trainings import KINDS

pytestmark = pytest.mark.release


@pytest.mark.timeout(540)  # on a machine that does much else, everything starts slowly, again and again
def test_a_service_that_is_killed_again_and_again_loses_nothing() -> None:
    wanted = Wanted(
        kills=12, seconds=12.0, at_once=len(KINDS), processes=2, lying=6, lease=3.0, patience=600.0
    )
    with tempfile.TemporaryDirectory(prefix="ws-crash-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running(folder, wanted) as campaign:
            outcome = campaign.carry_out(wanted)
    assert outcome.verdict.amiss == {}
    assert outcome.done.wrote == []
    assert outcome.runs >= len(KINDS)
    bad = sum(kind.bad for kind in KINDS)
    assert outcome.verdict.stops >= bad
    figures = report_of(outcome, wanted, quick=True).as_data()["figures"]
    assert figures["stop events lost"] == {"value": 0, "target": 0, "unit": "", "ok": True}
