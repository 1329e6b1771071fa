"""Rules over losses, data and predictions decide as Amazon documents them, on small real trainings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.rules.builtin.sagemaker import definitions
from tests.rules.builtin.sagemaker.trials import EVERY_STEP, Classifier, Saved, dense, judged, numbers
from tests.rules.runs import all_at_once
from watchstep import Hook, open_run
from watchstep.format.block import Block
from watchstep_rules.builtin.sagemaker.losses import (
    SagemakerStalledTraining,
    SagemakerStalledTrainingParams,
)
from watchstep_rules.builtin.system.stalled_training import StalledTrainingState
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.reference import reference_of

Numbers = Callable[[int], float]


def regression(
    hook: Hook, saved: Saved, *, rate: float, steps: int, every: int = 1, evaluate: int = 0
) -> None:
    """A line through points; the loss is logged each so many steps, that of other points each so many more."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    train, other = torch.randn(16, 8), torch.randn(64, 8)
    targets = torch.randn(16, 1), torch.randn(64, 1)
    for step in range(steps):
        saved.step = step
        optimizer.zero_grad()
        loss = (model(train) - targets[0]).square().mean()
        loss.backward()
        if step % every == 0:
            hook.log(loss=loss)
            saved.save("loss", loss.double())
        if evaluate and step % evaluate == 0:
            validation = (model(other) - targets[1]).square().mean()
            hook.log({"loss": validation}, mode="eval")
            saved.save("validation", validation)
        optimizer.step()
        hook.step()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rate", "every", "params", "fires"),
    [
        (0.05, 1, {"diff_percent": 0.01}, False),
        (1e-6, 1, {}, True),
        (0.05, 3, {"num_steps": 10, "diff_percent": 40.0}, True),
        (0.7, 1, {"num_steps": 3}, True),
        (0.05, 1, {"diff_percent": 0.01, "mode": "TRAIN"}, False),
        (1e-6, 1, {"mode": "modes.TRAIN", "tensor_regex": "loss", "use_losses_collection": "False"}, True),
        (1e-6, 1, {"tensor_regex": "other", "use_losses_collection": False}, False),
        (1e-6, 1, {"mode": "EVAL"}, False),
    ],
)
def test_loss_not_decreasing(
    tmp_path: Path, rate: float, every: int, params: dict[str, Any], fires: bool
) -> None:
    found, saved = judged(
        tmp_path,
        "sagemaker_loss_not_decreasing",
        params,
        partial(regression, rate=rate, steps=45, every=every),
    )
    judges = params.get("mode") != "EVAL" and params.get("tensor_regex") != "other"
    numbers_given = {name: value for name, value in params.items() if name in ("num_steps", "diff_percent")}
    expected = (
        definitions.loss_not_decreasing(numbers(saved.tensors["loss"]), **numbers_given) if judges else set()
    )
    assert {step for step, _ in found} == expected
    assert bool(found) is fires


def test_the_guides_example_of_steps() -> None:
    saved = dict.fromkeys(range(9, 40, 3), 1.0)
    assert definitions.loss_not_decreasing(saved, num_steps=10) == {21, 33}


def test_without_a_mode_the_losses_of_evaluations_count_once_there_are_some(tmp_path: Path) -> None:
    train = partial(regression, rate=1e-6, steps=45, evaluate=15)
    found, saved = judged(tmp_path, "sagemaker_loss_not_decreasing", {}, train)
    evaluated = definitions.loss_not_decreasing(numbers(saved.tensors["validation"]))
    assert {step for step, _ in found} == evaluated == {15, 30}
    found, saved = judged(tmp_path / "b", "sagemaker_loss_not_decreasing", {"mode": "TRAIN"}, train)
    assert {step for step, _ in found} == definitions.loss_not_decreasing(numbers(saved.tensors["loss"]))
    found, saved = judged(tmp_path / "c", "sagemaker_loss_not_decreasing", {"mode": "GLOBAL"}, train)
    assert {10, 20, 30, 40} <= {step for step, _ in found}


@pytest.mark.parametrize(
    ("rate", "params", "fires"),
    [
        (0.1, {}, True),
        (0.1, {"ratio_threshold": 1000.0}, False),
        (0.1, {"patience": 4, "start_step": 12}, True),
        (0.1, {"tensor_regex": ["other"]}, False),
        (1e-9, {"ratio_threshold": 5.0}, False),
    ],
)
def test_overfit(tmp_path: Path, rate: float, params: dict[str, Any], fires: bool) -> None:
    train = partial(regression, rate=rate, steps=60, evaluate=4)
    found, saved = judged(tmp_path, "sagemaker_overfit", params, train)
    bounds = {name: value for name, value in params.items() if name != "tensor_regex"}
    validation = {} if "tensor_regex" in params else numbers(saved.tensors["validation"])
    assert {step for step, _ in found} == definitions.overfit(
        numbers(saved.tensors["loss"]), validation, **bounds
    )
    assert bool(found) is fires


@pytest.mark.ci
def test_overfit_compares_the_means_of_several_losses(tmp_path: Path) -> None:
    def train(hook: Hook, _saved: Saved) -> None:
        for step in range(4):
            hook.log(loss_a=1.0, loss_b=3.0)
            hook.log({"loss_a": 2.0 + step, "loss_b": 2.0}, mode="eval")
            hook.step()

    found, _ = judged(tmp_path, "sagemaker_overfit", {}, train)
    assert {step for step, _ in found} == {1, 2, 3}
    found, _ = judged(tmp_path / "b", "sagemaker_overfit", {"tensor_regex": "loss_b"}, train)
    assert found == set()


@pytest.mark.parametrize(
    ("rate", "params", "fires"),
    [
        (0.02, {"delta": 0.0}, False),
        (1e-6, {}, True),
        (0.1, {"patience_train": 20}, True),
        (0.1, {"patience_validation": 6, "patience_train": 1000}, True),
    ],
)
def test_overtraining(tmp_path: Path, rate: float, params: dict[str, Any], fires: bool) -> None:
    train = partial(regression, rate=rate, steps=60, evaluate=0 if rate == 0.02 else 3)
    found, saved = judged(tmp_path, "sagemaker_overtraining", params, train)
    delta = params.get("delta", 0.01)
    expected = definitions.overtraining(
        numbers(saved.tensors["loss"]), params.get("patience_train", 5), delta
    )
    evaluated = numbers(saved.tensors.get("validation", {}))
    expected |= definitions.overtraining(evaluated, params.get("patience_validation", 10), delta)
    assert {step for step, _ in found} == expected
    assert bool(found) is fires


@pytest.mark.parametrize(("seed", "fires"), [(0, False), (1, True)])
@pytest.mark.parametrize("names", [{}, {"collection_names": "weights"}, {"tensor_regex": "loss"}])
def test_similar_across_runs(tmp_path: Path, seed: int, fires: bool, names: dict[str, str]) -> None:
    def train(hook: Hook, _saved: Saved, seed: int) -> None:
        torch.manual_seed(seed)
        model = dense(nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    with Hook(tmp_path / "first", config=EVERY_STEP) as hook:
        train(hook, Saved(), 0)
    other = reference_of(open_run(hook.run_url).rows(), "rms", include=".*weight$|loss", points=7)
    params = {"other_trials": other, **names}
    found, _ = judged(tmp_path / "second", "sagemaker_similar_across_runs", params, partial(train, seed=seed))
    assert bool(found) is fires
    if fires and "collection_names" in names:
        assert {name for _, name in found} == {"0.weight", "2.weight"}


@pytest.mark.parametrize(("seconds", "fires"), [(1790, False), (1801, True)])
@pytest.mark.parametrize("pause", [0, 1500])
def test_stalled_training(tmp_path: Path, seconds: int, fires: bool, pause: int) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook:
        Classifier(dense, steps=2)(hook, Saved())
    rows = open_run(hook.run_url).rows()
    rule, params, second = SagemakerStalledTraining(), SagemakerStalledTrainingParams(threshold="1800"), 10**9
    state: Any = StalledTrainingState()
    start, findings = int(rows.time_ns.max()), []
    state, _ = rule.evaluate(params, state, Block.empty(), rows, start)
    for tick in range(0, pause, 250):  # a pause that the run comes back from
        state, found = rule.evaluate(params, state, Block.empty(), Block.empty(), start + tick * second)
        assert not found
    state, _ = rule.evaluate(params, state, Block.empty(), rows, start + pause * second)
    for tick in [*range(250, seconds, 250), seconds]:
        state, found = rule.evaluate(
            params, state, Block.empty(), Block.empty(), start + (pause + tick) * second
        )
        findings += found
    assert bool(findings) is fires


Batch = tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[Any]]]


def predictions(rare: float, right: float, *, scores: bool, steps: int = 12, classes: int = 3) -> list[Batch]:
    """Labels of which the last class is rare, and what is predicted for them: so many right of the last, all of the others."""
    random = np.random.default_rng(0)
    shares = np.array([1.0] * (classes - 1) + [rare])
    batches = []
    for _ in range(steps):
        labels = random.choice(classes, size=100, p=shares / shares.sum())
        hit = (labels < classes - 1) | (random.random(100) < right)
        predicted = np.where(hit, labels, (labels + 1) % classes)
        batches.append((labels, np.eye(classes)[predicted] if scores else predicted))
    return batches


def given(hook: Hook, _saved: Saved, batches: list[Batch], name: str) -> None:
    """Record them along with a training."""
    for labels, predicted in batches:
        hook.record({"labels": torch.from_numpy(labels), name: torch.from_numpy(predicted)})
        hook.step()


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize(
    ("rare", "right", "params", "fires"),
    [
        (1.0, 1.0, {}, (False, False)),
        (0.05, 1.0, {}, (True, False)),
        (1.0, 0.2, {}, (False, True)),
        (1.0, 0.2, {"threshold_misprediction": "0.9"}, (False, False)),
        (0.05, 1.0, {"samples": 5000}, (False, False)),
        (0.3, 0.5, {"threshold_imbalance": 2, "threshold_misprediction": 0.4, "samples": 300}, (True, True)),
    ],
)
def test_class_imbalance(
    tmp_path: Path,
    rare: float,
    right: float,
    params: dict[str, Any],
    fires: tuple[bool, bool],
    scores: bool,
) -> None:
    batches = predictions(rare, right, scores=scores)
    found, _ = judged(
        tmp_path,
        "sagemaker_class_imbalance",
        {**params, "argmax": scores},
        partial(given, batches=batches, name="predictions"),
    )
    bounds = {name: float(value) for name, value in params.items()}
    steps, classes = definitions.class_imbalance(batches, **bounds, argmax=scores)  # type: ignore[arg-type]
    assert {step for step, name in found if name == "labels"} == steps
    assert {(step, name) for step, name in found if name != "labels"} == classes
    assert (bool(steps), bool(classes)) == fires


@pytest.mark.parametrize(
    ("right", "params", "fires"),
    [
        (1.0, {}, False),
        (0.5, {}, True),
        (0.9, {"min_diag": 0.0, "max_off_diag": 0.5}, False),
        (0.5, {"min_diag": 0.0, "max_off_diag": 0.3, "category_no": "3"}, True),
        (0.5, {"category_no": 4}, False),  # the fourth class has no label: the matrix is not populated
    ],
)
def test_confusion(tmp_path: Path, right: float, params: dict[str, Any], fires: bool) -> None:
    batches = predictions(1.0, right, scores=False, steps=25)  # more than the limit of recent batches
    found, _ = judged(
        tmp_path, "sagemaker_confusion", params, partial(given, batches=batches, name="outputs")
    )
    bounds = {name: value for name, value in params.items() if name != "category_no"}
    expected = definitions.confusion(batches, int(params.get("category_no", 3)), **bounds)
    assert found == expected
    assert bool(found) is fires


@pytest.mark.parametrize(
    ("shift", "params", "fires"),
    [
        ((0.0, 0.0, 0.0), {}, False),
        ((0.0, 0.5, 0.0), {}, True),
        ((0.4, 0.0, -0.4), {}, True),  # whose mean over all channels is nothing
        ((0.0, 0.5, 0.0), {"threshold_samples": 5000}, False),
        ((0.0, 0.5, 0.0), {"threshold_mean": "0.6"}, False),
        ((0.0, 0.5, 0.0), {"regex": ".*other"}, False),
    ],
)
@pytest.mark.parametrize("channel", [1, 3])
def test_check_input_images(
    tmp_path: Path, shift: tuple[float, ...], params: dict[str, Any], fires: bool, channel: int
) -> None:
    random = np.random.default_rng(0)
    shape = [80, 3, 4, 4] if channel == 1 else [80, 4, 4, 3]
    along = np.reshape(np.array(shift), [-1 if axis == channel else 1 for axis in range(4)])
    batches = [(random.normal(size=shape) + along).astype(np.float32) for _ in range(8)]

    def train(hook: Hook, _saved: Saved) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        for batch in batches:
            model(torch.from_numpy(batch)).square().mean().backward()
            optimizer.step()

    found, _ = judged(tmp_path, "sagemaker_check_input_images", {"channel": channel, **params}, train)
    bounds = {name: float(value) for name, value in params.items() if name != "regex"}
    expected = definitions.check_input_images(batches, channel=channel, **bounds)  # type: ignore[arg-type]
    assert {step for step, _ in found} == (set() if "regex" in params else expected)
    assert bool(found) is fires


@pytest.mark.parametrize(
    ("params", "fires"),
    [
        ({}, False),
        ({"token_thresholds_percent": "20"}, True),
        ({"token_values": "3, 0", "token_thresholds_percent": "1.0, 50.0"}, True),
        ({"token_values": [3, 7], "token_thresholds_percent": [60, 60]}, False),
        ({"token_thresholds_percent": "20", "tensor_regex": "1_.*"}, False),
    ],
)
def test_nlp_sequence_ratio(tmp_path: Path, params: dict[str, Any], fires: bool) -> None:
    random = np.random.default_rng(0)
    batches = [
        random.integers(0, 4, size=(40, 30 + 10 * step)) for step in range(12)
    ]  # some longer than samples

    def train(hook: Hook, _saved: Saved) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        for batch in batches:
            model(torch.from_numpy(batch)).square().mean().backward()
            optimizer.step()

    found, _ = judged(tmp_path, "sagemaker_nlp_sequence_ratio", params, train)
    tokens = [int(text) for text in str(params.get("token_values", "0")).strip("[]").split(",")]
    limits = [
        float(text) for text in str(params.get("token_thresholds_percent", "50,50")).strip("[]").split(",")
    ]
    expected = set() if "tensor_regex" in params else definitions.nlp_sequence_ratio(batches, tokens, limits)
    assert {step for step, _ in found} == expected
    assert bool(found) is fires


def boosted(hook: Hook, saved: Saved, *, depth: int, used: int) -> None:
    """Trees over features of which some determine the target; their nodes and importances are saved."""
    import xgboost

    from watchstep.xgboost import Recording

    random = np.random.default_rng(0)
    inputs = random.normal(size=(300, 12))
    data = xgboost.DMatrix(inputs, (inputs[:, :used] ** 2).sum(1))

    class Beside(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: dict[str, Any]) -> bool:
            saved.step = epoch
            table = model.trees_to_dataframe()
            newest = table[table["Tree"] == epoch]
            saved.save("nodes", torch.tensor(int(newest["Node"].max())))
            scores = list(model.get_score(importance_type="weight").values())
            saved.save(
                "importance", torch.tensor([*scores, *[0.0] * (12 - len(scores))], dtype=torch.float64)
            )
            return False

    xgboost.train(
        {"max_depth": depth, "nthread": 1}, data, 6, callbacks=[Beside(), Recording(hook)], verbose_eval=False
    )


@pytest.mark.parametrize(
    ("depth", "params", "fires"),
    [(2, {}, False), (3, {}, False), (4, {}, True), (4, {"depth": "5.0"}, False)],
)
def test_tree_depth(tmp_path: Path, depth: int, params: dict[str, Any], fires: bool) -> None:
    pytest.importorskip(
        "xgboost", reason="XGBOOST IS NOT INSTALLED: rules over trees are not proven by this run"
    )
    found, saved = judged(tmp_path, "sagemaker_tree_depth", params, partial(boosted, depth=depth, used=8))
    nodes = [int(value) for _, value in sorted(saved.tensors["nodes"].items())]
    assert {step for step, _ in found} == definitions.tree_depth(nodes, float(params.get("depth", 4)))
    assert bool(found) is fires


@pytest.mark.parametrize(
    ("used", "params", "fires"),
    [
        (12, {"threshold": 0.9}, False),
        (1, {}, True),
        (12, {"nfeatures": "9", "threshold": "0.75"}, True),
        (1, {"tensor_regex": ".*feature_importance/gain", "threshold": 2}, False),
    ],
)
def test_feature_importance_overweight(
    tmp_path: Path, used: int, params: dict[str, Any], fires: bool
) -> None:
    pytest.importorskip(
        "xgboost", reason="XGBOOST IS NOT INSTALLED: rules over trees are not proven by this run"
    )
    train = partial(boosted, depth=5 if used > 1 else 2, used=used)
    found, saved = judged(tmp_path, "sagemaker_feature_importance_overweight", params, train)
    importances = [value for _, value in sorted(saved.tensors["importance"].items())]
    threshold, nfeatures = float(params.get("threshold", 0.8)), int(params.get("nfeatures", 3))
    expected = definitions.feature_importance_overweight(importances, threshold, nfeatures)
    assert {step for step, _ in found} == expected
    assert bool(found) is fires


def test_a_report_judges_nothing(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook:
        regression(hook, Saved(), rate=0.1, steps=3)
    rows = open_run(hook.run_url).rows()
    for rule in ("create_xgboost_report", "overall_system_usage", "overall_framework_metrics"):
        assert all_at_once(RuleConfig(rule=f"sagemaker_{rule}"), rows).findings == []
