"""At which steps bundles are taken: that of the gate is of its own step, or of none."""

from __future__ import annotations

from watchstep.capture.config import Bundles
from watchstep.capture.health import RecorderHealth
from watchstep.capture.tensors.bundle_plan import LATE, BundleOccasion, BundlePlan


def plan() -> BundlePlan:
    return BundlePlan(Bundles(), RecorderHealth())


def test_a_failing_step_is_bundled_also_if_it_is_incomplete() -> None:
    bundles = plan()
    bundles.bad(3)
    assert bundles.is_pending
    assert bundles.due(3, is_complete=False) == BundleOccasion("gate")
    assert not bundles.is_pending


def test_no_other_step_is_called_the_failing_one() -> None:
    bundles = plan()
    bundles.bad(3)
    assert bundles.due(4, is_complete=False) is None
    assert bundles.due(5, is_complete=True) == BundleOccasion("alert", (LATE,))
    assert not bundles.is_pending


def test_a_failing_step_without_an_update_does_not_use_up_the_two_of_the_gate() -> None:
    bundles = plan()
    taken = []
    for step in range(0, 60, 10):
        bundles.bad(step)
        taken.append(bundles.due(step + 1, is_complete=True))
    assert taken == [BundleOccasion("alert", (LATE,))] * 2 + [None] * 4
    for step in (100, 110, 120):
        bundles.bad(step)
        taken.append(bundles.due(step, is_complete=True))
    assert taken[-3:] == [BundleOccasion("gate"), BundleOccasion("gate"), None]
