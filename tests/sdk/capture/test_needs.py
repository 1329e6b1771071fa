"""Needs of rules in the configuration of a recording."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.capture.config import BUILT_IN, FIGURES_ONLY, Cadence, CaptureConfig, Collection, TensorLimits
from watchstep.capture.needs import not_provided, with_needs, with_tensors
from watchstep.capture.steps.session import Session
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.tensors import MODES, Mode

EVERY_20 = CaptureNeed("a", ("activations",), (), 20, ("train",))
modes = st.lists(st.sampled_from(MODES), max_size=3, unique=True).map(tuple)
needs = st.builds(
    CaptureNeed,
    st.sampled_from(["a", "b"]),
    st.lists(st.sampled_from([*BUILT_IN, "mine"]), max_size=3).map(tuple),
    st.lists(st.sampled_from(["inactive_units:1.0", "input_variance"]), max_size=2).map(tuple),
    st.sampled_from([0, 1, 7, 20, 100]),
    modes,
)


def tensors_of(config: CaptureConfig, name: str = "activations") -> Cadence | None:
    return config.chosen[name].tensors


def test_without_needs_a_configuration_is_as_it_was() -> None:
    config = CaptureConfig()
    assert with_needs(config, []) is config
    assert not_provided(config, []) == ""


def test_the_most_frequent_cadence_counts_in_all_modes() -> None:
    config = with_needs(
        CaptureConfig(), [EVERY_20, replace(EVERY_20, every=5, modes=("eval",)), replace(EVERY_20, every=9)]
    )
    assert tensors_of(config) == Cadence(5, modes=("train", "eval"))
    assert tensors_of(with_needs(CaptureConfig(), [EVERY_20, replace(EVERY_20, modes=())])) == Cadence(20)


@pytest.mark.parametrize(
    ("own", "combined"),
    [
        (Cadence(10, start=5, stop=90, modes=("train",)), Cadence(10, start=5, stop=90, modes=("train",))),
        (Cadence(20, modes=("eval",)), Cadence(20, modes=("train", "eval"))),
        (Cadence(50, start=7, modes=("train",)), Cadence(20, modes=("train",))),
        (Cadence(None, steps=(3, 4), modes=("train",)), Cadence(20, steps=(3, 4), modes=("train",))),
        (Cadence(1), Cadence(1)),
    ],
    ids=str,
)
def test_a_denser_cadence_of_the_program_is_kept(own: Cadence, combined: Cadence) -> None:
    limits = TensorLimits(ring_bytes=1000)
    config = CaptureConfig(collections={"activations": Collection(tensors=own, tensor_limits=limits)})
    changed = with_needs(config, [EVERY_20])
    assert tensors_of(changed) == combined
    assert changed.chosen["activations"].tensor_limits == limits


@given(st.lists(needs, max_size=5), st.booleans())
def test_a_configuration_with_needs_provides_what_can_be_provided(
    wanted: list[CaptureNeed], has_own: bool
) -> None:
    own = {"activations": Collection(tensors=Cadence(3))} if has_own else {}
    config = CaptureConfig(collections={**CaptureConfig().collections, **own})
    changed = with_needs(config, wanted)
    for need in wanted:
        assert set(need.probes) <= set(changed.probes)
        for name in need.collections:
            if name not in BUILT_IN:
                continue
            assert name in changed.chosen
            cadence = changed.chosen[name].tensors
            if need.every and name not in FIGURES_ONLY:
                assert cadence is not None
                assert cadence.every is not None
                assert cadence.every <= need.every
                assert all(cadence.applies_in(mode) for mode in need.modes or MODES)
    # What cannot be provided is named by its rule.
    problem = not_provided(changed, wanted)
    for need in wanted:
        lacks = need.collections and all(name == "mine" for name in need.collections)
        if lacks:
            assert f"rule {need.rule}: mine not recorded" in problem
    for name, collection in config.chosen.items():
        if not any(name in need.collections for need in wanted):
            assert changed.chosen[name] == collection
    assert with_needs(changed, wanted) == changed


def test_what_a_recording_cannot_provide_is_said_for_each_rule() -> None:
    config = CaptureConfig(collections={"weights": Collection(), "updates": Collection()})
    problem = not_provided(
        config,
        [
            EVERY_20,
            CaptureNeed("b", ("weights", "gradients"), ("inactive_units:1.0",)),
            CaptureNeed("c", ("updates",), (), 5),
            CaptureNeed("d", ("weights", "gradients"), (), 5),
        ],
    )
    assert problem == (
        "rule a: activations not recorded; rule b: inactive_units:1.0 not measured; restart the run with the rule; "
        "rule c: no full tensors of updates"
    )
    many = [replace(EVERY_20, rule=f"r{number}") for number in range(9)]
    assert not_provided(config, many).endswith("rule r4: activations not recorded; and 4 more")


def test_only_configured_collections_are_saved_once_a_recording_runs() -> None:
    collections = with_tensors(
        {"weights": Collection()}, [EVERY_20, replace(EVERY_20, collections=("weights",))]
    )
    assert {name: collection.tensors for name, collection in collections.items()} == {
        "weights": Cadence(20, modes=("train",))
    }


def test_a_session_saves_what_the_newest_needs_say_and_says_what_it_cannot() -> None:
    session = Session.begin(
        CaptureConfig(collections={"weights": Collection(), "losses": Collection()}), 0, "raise"
    )
    wanted = CaptureNeed("a", ("weights",), (), 5, ("train",))
    saved: list[tuple[int, Mode]] = [(5, "train"), (6, "train"), (10, "eval")]

    def due() -> list[bool]:
        return [session.full_tensors.due(["weights"], step, mode) is not None for step, mode in saved]

    session.capture_for([wanted])
    assert due() == [True, False, False]
    session.capture_for([wanted, EVERY_20])
    assert "rule a: activations not recorded" in str(session.health.counted())
    session.capture_for([])
    assert due() == [False, False, False]
    assert "activations not recorded" not in str(session.health.counted())
