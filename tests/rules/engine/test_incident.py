"""Incidents: which alerts form one, what its cause is, and that neither order nor cuts matter."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.engine.test_late import Rank, arrivals, calm, judged, lasting, some_ranks
from tests.rules.runs import Said
from watchstep_rules.engine.alert import coalesce
from watchstep_rules.engine.incident import (
    Onset,
    cause_of,
    incident_id,
    incidents_of,
    onset_changes,
    summarize,
    unaffected_before,
)
from watchstep_rules.rule import Finding


def onset(
    rule: str,
    step: int,
    *,
    config: int | None = None,
    role: str = "",
    order: int = 0,
    severity: str = "warning",
) -> Onset:
    finding = Finding(
        rule=rule,
        step=step,
        mode="train",
        worker=0,
        tensor=f"{rule}:tensor",
        module="",
        module_type="",
        role=role,
        value=1.0,
        threshold=0.5,
        message=f"what {rule} found at step {step}",
        time_ns=0,
        cause_rank=(0, order),
    )
    return Onset(
        config=sum(rule.encode()) if config is None else config,
        name=rule,
        rule=rule,
        severity=severity,
        step=step,
        finding=finding,
        check=f"check {rule}",
    )


LEARNING_RATE = (
    onset("nan_or_inf", 206, config=1, severity="critical"),
    onset("non_finite_values", 205, config=2),
    onset("loss_spike", 201, config=3),
    onset("lost_progress", 201, config=4),
    onset("exploding_gradient", 201, config=5),
    onset("hyperparameter_jump", 200, config=6),
)


def test_what_follows_from_a_learning_rate_is_one_incident_whose_cause_it_is() -> None:
    (incident,) = incidents_of(LEARNING_RATE)
    said = summarize("abc", incident, {"replica_divergence", "nan_or_inf"})
    assert said.cause == "hyperparameter_jump"
    assert said.message == "what hyperparameter_jump found at step 200"
    assert said.check_first == "check hyperparameter_jump"
    assert (said.first_step, said.last_step) == (200, 206)
    assert said.alerts[:2] == ("hyperparameter_jump", "exploding_gradient")
    assert said.against == ("the recorded replicas agree (replica_divergence)",)


def test_without_the_jump_the_gradient_is_the_cause_and_that_nothing_jumped_is_said() -> None:
    (incident,) = incidents_of(LEARNING_RATE[:-1])
    said = summarize("abc", incident, {"hyperparameter_jump", "exploding_gradient"})
    assert said.cause == "exploding_gradient"
    assert said.against == ("no recorded hyperparameter jumped (hyperparameter_jump)",)


def test_a_jump_after_the_first_onset_is_no_cause_of_it() -> None:
    (incident,) = incidents_of([onset("loss_spike", 200), onset("hyperparameter_jump", 203)])
    assert cause_of(incident).rule == "loss_spike"


def test_nan_in_an_input_comes_before_what_it_does_to_gradients_and_layers_before_later_ones() -> None:
    (incident,) = incidents_of(
        [
            onset("non_finite_values", 5, role="input"),
            onset("exploding_gradient", 5, config=1, order=1),
            onset("exploding_gradient", 5, config=2, order=0),
        ]
    )
    assert cause_of(incident).rule == "non_finite_values"
    assert cause_of(incident[-2:]).finding.cause_rank == (0, 0)


def test_what_begins_far_away_is_another_incident_and_an_alert_that_flaps_does_not_extend_one() -> None:
    assert [len(one) for one in incidents_of([onset("loss_spike", 0), onset("dead_relu", 51)])] == [1, 1]
    assert [len(one) for one in incidents_of([onset("loss_spike", 0), onset("dead_relu", 50)])] == [2]
    flaps = [onset("loss_spike", step) for step in range(0, 200, 20)]
    assert [one[0].step for one in incidents_of(flaps)] == [0, 60, 120, 180]


onsets = st.lists(
    st.builds(
        lambda config, step: onset(f"rule{config}", step, config=config),
        st.integers(0, 4),
        st.integers(0, 400),
    ),
    max_size=20,
    unique_by=lambda one: (one.config, one.step),
)


@given(onsets, st.data())
def test_in_whichever_order_onsets_become_known_or_are_taken_back_the_incidents_are_the_same(
    final: list[Onset], data: st.DataObject
) -> None:
    taken_back = [one for one in data.draw(onsets) if one not in final]
    order = data.draw(st.permutations([*final, *taken_back]))
    there: list[tuple[Onset, ...]] = []
    for added, removed in [*(([one], []) for one in order), *(([], [one]) for one in taken_back)]:
        there = changed(there, added, removed)
    assert there == incidents_of(final)


def changed(
    before: Sequence[tuple[Onset, ...]], added: Sequence[Onset], removed: Sequence[Onset]
) -> list[tuple[Onset, ...]]:
    """Only incidents near a change are made anew."""
    bound = unaffected_before(min(one.step for one in (*added, *removed)))
    near = [one for one in before if one[-1].step >= bound]
    kept = [one for incident in near for one in incident if one not in removed]
    return [*(one for one in before if one[-1].step < bound), *incidents_of([*kept, *added])]


def steps_of_onsets(said: Said) -> list[int]:
    return sorted(onset_changes(coalesce(said.transitions), None).added)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(some_ranks, st.integers(1, 3), st.integers(1, 3), st.data())
def test_in_whichever_order_and_cuts_rows_come_alerts_have_the_same_onsets(
    ranks: list[Rank], hold: int, keep: int, data: st.DataObject
) -> None:
    config = lasting(hold, keep)
    said = judged(config, ranks, data.draw(arrivals(len(ranks))))
    assert steps_of_onsets(said) == steps_of_onsets(calm(config, ranks))


def test_the_id_is_of_the_attempt_and_the_first_onset() -> None:
    assert incident_id("vision", "night", "a1", 5) == incident_id("vision", "night", "a1", 5)
    assert (
        len({incident_id("vision", "night", attempt, step) for attempt in ("a1", "a2") for step in (5, 6)})
        == 4
    )
