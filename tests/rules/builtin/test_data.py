"""Rules over labels and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.runs import all_at_once, found_by, in_steps, steps_of
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, Values, block_of, tensor
from watchstep import Hook
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

# class_imbalance


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


def imbalanced(series: Sequence[tuple[float, ...]], **params: object) -> list[int]:
    return steps_of(all_at_once(RuleConfig(rule="class_imbalance", params=params), counts(series)), "labels")


def test_a_rare_class_is_found_once_chance_is_ruled_out() -> None:
    series = [(31.0 * k, 1.0 * k) for k in range(1, 40)]
    assert 0 < imbalanced(series)[0] < 20
    assert imbalanced(series)[-1] == 38
    assert imbalanced(series, ratio=50) == []


def test_classes_within_ten_to_one_are_fine() -> None:
    assert imbalanced([(28.0 * k, 4.0 * k) for k in range(1, 200)]) == []
    assert imbalanced([(31.0, 1.0), (62.0, 2.0)]) == []


def test_a_class_that_comes_late_is_given_time() -> None:
    in_order = [(32.0 * min(k, 10), 32.0 * max(0, k - 10)) for k in range(1, 21)]
    assert imbalanced(in_order) == []


def test_one_class_alone_and_labels_that_are_no_classes_are_not_judged() -> None:
    assert imbalanced([(32.0 * k,) for k in range(1, 30)]) == []
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


# confusion


def trained_on_labels(hook: Hook, *, exchanged: bool) -> None:
    """Train on three classes; a tenth of the second's labels, or all of them, are the third's now and then."""
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    task = Task(1, classes=3, noise=0.0)
    own = torch.Generator().manual_seed(0)
    for x, y in task.batches(64, 300):
        mixed = (y == 1) & (torch.rand(len(y), generator=own) < 0.5)
        labels = torch.where(mixed, 2, y) if exchanged else y
        optimizer.zero_grad()
        outputs = model(x)
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
        hook.record(labels=y, outputs=outputs)
        hook.step()


@pytest.mark.ci
def test_two_classes_whose_labels_are_mixed_up_and_the_twin(tmp_path: Path) -> None:
    torch.manual_seed(0)
    late: dict[str, object] = {"from_step": 250, "examples": 100}
    found = evaluate_training(
        lambda hook: trained_on_labels(hook, exchanged=True), "confusion", tmp_path / "a", late
    )
    assert {finding.tensor for finding in found} == {"confusion/1"}
    assert found[0].step >= 250
    assert "were predicted right" in found[0].message
    assert "as class 2" in found[0].message
    torch.manual_seed(0)
    assert (
        evaluate_training(
            lambda hook: trained_on_labels(hook, exchanged=False), "confusion", tmp_path / "b", late
        )
        == []
    )


def test_the_two_tests_and_their_limits(tmp_path: Path) -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2] * 5)
    guesses = torch.tensor([0] * 17 + [1] * 3 + [1] * 20 + [0] * 5)

    def once(hook: Hook) -> None:
        hook.record(labels=labels, outputs=guesses)

    def found(name: str, **params: object) -> list[tuple[str, float]]:
        return [
            (finding.tensor, finding.value)
            for finding in evaluate_training(once, "confusion", tmp_path / name, params)
        ]

    assert found("a") == [("confusion/0", 0.85)]
    assert found("b", min_diag=0.8) == [("confusion/0", 0.15)]
    assert found("c", min_diag=0.8, max_off_diag=0.2) == []
    assert found("d", min_diag=0.8, max_off_diag=0.2, examples=5) == [("confusion/2", 0.0)]


# input_image_mean


IMAGES = tensor("model:input", "inputs", shape=(100, 1, 1, 2))
"""A hundred images of two pixels."""
CENTRED, SHIFTED = [-1.0, 1.0] * 100, [1.5, 3.5] * 100


def off_centre(records: list[Values], info: TensorInfo = IMAGES, **params: Any) -> list[int]:
    rows = [Row(step, info, values) for step, values in enumerate(records)]
    return found_by("input_image_mean")(block_of(rows), **params)


def test_images_that_are_not_centred_are_found_after_five_hundred() -> None:
    assert off_centre([SHIFTED] * 7) == [4, 5, 6]
    assert off_centre([CENTRED] * 7) == []


def test_the_scale_does_not_matter_unless_a_threshold_does() -> None:
    large = [100 * value for value in CENTRED[:-1]] + [0.0]
    assert off_centre([large] * 5) == []
    assert off_centre([large] * 5, ratio=None, threshold=0.2) == [4]
    assert off_centre([[1e-3 * value for value in SHIFTED]] * 5) == [4]


def test_all_images_so_far_count() -> None:
    minus = [-value for value in SHIFTED]
    assert off_centre([SHIFTED, minus] * 4) == []


@pytest.mark.parametrize(
    "info", [replace(IMAGES, shape=(100, 2)), replace(IMAGES, dtype="uint8"), replace(IMAGES, role="output")]
)
def test_what_is_no_image_is_ignored(info: TensorInfo) -> None:
    assert off_centre([SHIFTED] * 7, info) == []


def test_a_batch_of_another_size_has_as_many_images_as_values() -> None:
    assert off_centre([SHIFTED[:20]] * 49) == []
    assert off_centre([SHIFTED[:20]] * 51) == [49, 50]


# token_ratio


WORDS = tensor("words:output", "activations")


def trained_on_words(hook: Hook, longest: int) -> None:
    """Train on sentences of one to so many words, padded to ten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, padding_idx=3), nn.Flatten(), nn.Linear(40, 2))
    optimizer = optim.SGD(model.parameters(), 0.1)
    hook.watch(model, optimizer)
    for _ in range(15):
        tokens = torch.randint(4, 50, (16, 10))
        lengths = torch.randint(1, longest + 1, (16, 1))
        tokens[torch.arange(10) >= lengths] = 3
        optimizer.zero_grad()
        model(tokens).sum().backward()
        optimizer.step()


def test_sentences_that_are_mostly_padding_and_the_twin(tmp_path: Path) -> None:
    found = evaluate_training(lambda hook: trained_on_words(hook, 5), "token_ratio", tmp_path / "a")
    assert {finding.tensor for finding in found} == {"0:output"}
    assert found[0].step == 9
    assert "is padding or another watched token, more than 50%" in found[0].message
    assert evaluate_training(lambda hook: trained_on_words(hook, 12), "token_ratio", tmp_path / "b") == []


def padded(watched: list[float], top: list[float], **params: object) -> list[int]:
    rows = [
        Row(step, WORDS, [0.0], probes={"token_share": watched_share, "top_token_share": top_share})
        for step, (watched_share, top_share) in enumerate(zip(watched, top, strict=True))
    ]
    return steps_of(
        all_at_once(RuleConfig(rule="token_ratio", params={"window": 2, **params}), in_steps(rows)),
        WORDS.name,
    )


def test_shares_are_averaged_over_the_window() -> None:
    assert padded([0.9, 0.0, 0.9, 0.2, 0.2], [0.9] * 5) == [3]
    assert padded([0.0] * 3, [0.9, 0.9, 0.1], top_share=0.8) == [1]
    assert padded([0.0] * 3, [0.9] * 3) == []
