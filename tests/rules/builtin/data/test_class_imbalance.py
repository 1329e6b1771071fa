from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.rules.recording import evaluate_training
from tests.rules.runs import all_at_once, steps_of
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep import Hook
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig

LABELS = tensor("labels", "labels", shape=(32,))


def counts(series: Sequence[tuple[float, ...]]) -> Block:
    """Counts of each class so far, record after record."""
    rows = []
    for step, by_class in enumerate(series):
        seen = [count for count in by_class if count]
        figures = [sum(seen), len(seen), max(seen), min(seen), by_class.index(min(seen))]
        names = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")
        rows.append(Row(step, LABELS, [0.0], probes=dict(zip(names, map(float, figures), strict=True))))
    return block_of(rows)


def found(series: Sequence[tuple[float, ...]], **params: object) -> list[int]:
    return steps_of(all_at_once(RuleConfig(rule="class_imbalance", params=params), counts(series)), "labels")


def test_a_rare_class_is_found_once_chance_is_ruled_out() -> None:
    series = [(31.0 * k, 1.0 * k) for k in range(1, 40)]
    assert 0 < found(series)[0] < 20
    assert found(series)[-1] == 38
    assert found(series, ratio=50) == []


def test_classes_within_ten_to_one_are_fine() -> None:
    assert found([(28.0 * k, 4.0 * k) for k in range(1, 200)]) == []
    assert found([(31.0, 1.0), (62.0, 2.0)]) == []


def test_a_class_that_comes_late_is_given_time() -> None:
    in_order = [(32.0 * min(k, 10), 32.0 * max(0, k - 10)) for k in range(1, 21)]
    assert found(in_order) == []


def test_one_class_alone_and_labels_that_are_no_classes_are_not_judged() -> None:
    assert found([(32.0 * k,) for k in range(1, 30)]) == []
    rows = [Row(step, LABELS, [0.5], probes={"classes": float("nan")}) for step in range(3)]
    assert all_at_once(RuleConfig(rule="class_imbalance"), block_of(rows)).findings == []
    plain = [Row(step, LABELS, [0.5]) for step in range(3)]
    assert all_at_once(RuleConfig(rule="class_imbalance"), block_of(plain)).findings == []


def test_the_finding_states_which_class() -> None:
    outcome = all_at_once(RuleConfig(rule="class_imbalance"), counts([(500.0, 1.0), (4000.0, 10.0)]))
    assert outcome.findings[0].value == 400
    assert outcome.findings[0].message == (
        "of 4010 labels so far 10 are class 1, and 4000 are of the largest class: more than 10 to 1"
    )


def test_a_class_that_is_mostly_predicted_wrong_is_found_if_requested(tmp_path: Path) -> None:
    labels = torch.tensor([0] * 30 + [1] * 30)
    guesses = torch.tensor([0] * 54 + [1] * 6)

    def train(hook: Hook) -> None:
        hook.record(labels=labels, outputs=guesses)

    found = evaluate_training(train, "class_imbalance", tmp_path / "a", {"misprediction": 0.7})
    assert [finding.tensor for finding in found] == ["confusion/1"]
    assert found[0].value == pytest.approx(0.8)
    assert found[0].message == "confusion/1: of 30 examples 80% were predicted wrong, more than 70%"
    assert evaluate_training(train, "class_imbalance", tmp_path / "b", {"misprediction": 0.9}) == []
    assert (
        evaluate_training(train, "class_imbalance", tmp_path / "c", {"misprediction": 0.7, "examples": 31})
        == []
    )
    assert evaluate_training(train, "class_imbalance", tmp_path / "d") == []
