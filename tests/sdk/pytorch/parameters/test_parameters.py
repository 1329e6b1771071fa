"""Hyperparameters of optimizers, parameters that get gradients but belong to no optimizer, and what replicas state of their updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.sdk.training import EVERY_STEP, batches, recorded, small_model, train_step, watching, with_sgd
from watchstep import Cadence, CaptureConfig, Hook, Run
from watchstep.capture.steps.metric_names import NONFINITE_APPLIED
from watchstep.format.tensors import Placement
from watchstep.pytorch.names import ParameterPlacement

STEPS = 6


def trained(
    store: Path,
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    each: Callable[[int], Any] = lambda _: None,
    *,
    steps: int = STEPS,
    config: CaptureConfig = EVERY_STEP,
) -> Run:
    hook = watching(store, model, optimizer, config=config)
    for step, (x, y) in enumerate(batches(steps)):
        train_step(model, optimizer, x, y)
        each(step)
    return recorded(hook)


def series(run: Run, name: str) -> dict[int, float]:
    rows = run.tensor(name).statistics().to_pydict()
    return dict(zip(rows["step"], rows["mean"], strict=True))


def names(run: Run) -> list[str]:
    return sorted(name for name in run.tensors() if name.startswith("optimizer:") and "/" in name)


def test_every_group_at_the_start_and_where_it_changes(tmp_path: Path) -> None:
    model = small_model()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "name": "trunk"},
        {"params": model[3].parameters(), "lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def each(step: int) -> None:
        if step == 2:
            optimizer.param_groups[0]["lr"] *= 100
        if step == 3:
            optimizer.param_groups[1]["weight_decay"] = 0.1

    run = trained(tmp_path, model, optimizer, each)
    assert series(run, "optimizer:learning_rate/trunk") == {0: 1e-2, 3: 1.0}
    assert series(run, "optimizer:learning_rate/1") == {0: 0.5}
    assert series(run, "optimizer:weight_decay/1") == {0: 0.0, 4: 0.1}
    assert (series(run, "optimizer:beta1/trunk"), series(run, "optimizer:beta2/1")) == ({0: 0.9}, {0: 0.9})
    assert len(names(run)) == 8
    info = run.tensor("optimizer:learning_rate/1").info
    assert (info.role, info.collections) == ("metric", ("metrics",))


def test_a_schedule_leaves_a_row_at_each_change(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    run = trained(tmp_path, model, optimizer, lambda _: schedule.step())
    assert series(run, "optimizer:learning_rate/0") == pytest.approx({0: 0.1, 2: 0.01, 4: 0.001})
    assert names(run) == [f"optimizer:{name}/0" for name in ("learning_rate", "momentum", "weight_decay")]


@pytest.mark.parametrize(
    ("momentum", "loaded", "expected"),
    [(0.9, False, {0: 0.0, 1: 1.0}), (0.9, True, {0: 1.0, 1: 1.0}), (0.0, False, {0: 0.0, 1: 0.0})],
)
def test_whether_an_optimizer_begins_with_state(
    tmp_path: Path, momentum: float, loaded: bool, expected: dict[int, float]
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if loaded:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        optimizer.load_state_dict(saved)
    assert series(trained(tmp_path, model, optimizer), "optimizer:has_state") == expected


def test_values_that_are_tensors_and_change_in_place(tmp_path: Path) -> None:
    model = small_model()
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    run = trained(tmp_path, model, optimizer, lambda step: rate.fill_(0.5) if step == 1 else rate.fill_(rate))
    assert series(run, "optimizer:learning_rate/0") == {0: 0.25, 2: 0.5}


def test_what_has_not_changed_is_recorded_again_after_a_thousand_steps(tmp_path: Path) -> None:
    model, optimizer = with_sgd(nn.Sequential(nn.Linear(8, 2)), 0.5)
    config = CaptureConfig({"metrics": Cadence()}, system=None)
    run = trained(tmp_path, model, optimizer, steps=1002, config=config)
    assert series(run, "optimizer:learning_rate/0") == {0: 0.5, 1000: 0.5}


def test_a_second_optimizer_and_groups_that_come_later(tmp_path: Path) -> None:
    model = small_model()
    first = torch.optim.SGD(model[3].parameters(), lr=0.1)
    second = torch.optim.SGD(model[0].parameters(), lr=0.01)

    def each(step: int) -> None:
        second.step()
        if step == 1:
            first.add_param_group({"params": model[2].parameters(), "lr": 0.3})

    run = trained(tmp_path, model, first, each)
    assert series(run, "optimizer_2:learning_rate/0") == {0: 0.01}
    assert series(run, "optimizer:learning_rate/1") == {2: 0.3}


def test_labels_distinguish_groups_and_are_not_taken_for_losses(tmp_path: Path) -> None:
    model = small_model()
    groups = [
        {"params": [parameter], "name": name}
        for parameter, name in zip(model.parameters(), ("same", "same", "loss_head", ""), strict=False)
    ]
    run = trained(tmp_path, model, torch.optim.SGD(groups, lr=0.1))
    rates = [name for name in names(run) if "learning_rate" in name]
    assert rates == [f"optimizer:learning_rate/{number}" for number in range(4)]
    assert run.losses().column_names.count("optimizer:learning_rate/2") == 0


def test_a_program_of_very_many_groups_has_the_first_on_record(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(70)), nn.Linear(2, 8))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=0.1)
    hook = watching(tmp_path, model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run = recorded(hook)
    assert len([name for name in names(run) if "learning_rate" in name]) == 64
    assert "71 parameter groups" in hook.health["notes"]["hyperparameters"]


def test_nothing_where_metrics_are_not_recorded(tmp_path: Path) -> None:
    model = small_model()
    config = CaptureConfig({"losses": Cadence()}, system=None)
    assert names(trained(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)) == []


def test_sql_reads_them(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model(), 0.5)
    run = trained(tmp_path, model, optimizer)
    query = "SELECT step, mean FROM statistics WHERE tensor LIKE 'optimizer%:learning_rate/%'"
    assert run.sql(query).to_pydict() == {"step": [0], "mean": [0.5]}


THREE_REPORTS = 51  # steps; rows about parameters outside of optimizers come at steps 0, 25 and 50


def trained_with(
    store: Path, model: nn.Module, *optimizers: torch.optim.Optimizer, by_hand: bool = False
) -> Run:
    hook = Hook(store)
    hook.watch(model, optimizers[0])
    for step, (x, y) in enumerate(batches(THREE_REPORTS)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizers[0].step()
        if step % 10 == 9:
            for optimizer in optimizers[1:]:
                optimizer.step()
        if by_hand:
            with torch.no_grad():
                model[0].weight.mul_(0.999)  # type: ignore[index]  # a Sequential
    return recorded(hook)


def not_in_optimizer(run: Run) -> list[str]:
    return sorted(name for name in run.tensors() if name.endswith(":not_in_optimizer"))


def test_gradients_of_parameters_of_no_optimizer(tmp_path: Path) -> None:
    model = small_model()
    model[2].requires_grad_(requires_grad=False)
    run = trained_with(tmp_path, model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    assert not_in_optimizer(run) == ["0.bias:not_in_optimizer", "0.weight:not_in_optimizer"]
    rows = run.tensor("0.weight:not_in_optimizer").statistics().to_pydict()
    assert rows["step"] == [0, 25, 50]
    assert rows["probe.changed"] == [0.0, 0.0, 0.0]
    assert min(rows["abs_sum"]) > 0
    assert run.tensor("0.weight:not_in_optimizer").info.role == "not_in_optimizer"


def test_a_parameter_that_the_program_changes_by_hand(tmp_path: Path) -> None:
    model = small_model()
    run = trained_with(tmp_path, model, torch.optim.SGD(model[3].parameters(), lr=0.1), by_hand=True)
    assert run.tensor("0.weight:not_in_optimizer").statistics().to_pydict()["probe.changed"] == [
        0.0,
        1.0,
        1.0,
    ]
    assert run.tensor("0.bias:not_in_optimizer").statistics().to_pydict()["probe.changed"] == [0.0, 0.0, 0.0]


def test_another_optimizer_has_them_before_it_has_stepped(tmp_path: Path) -> None:
    model = small_model()
    head, trunk = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[3], model[:3]))
    assert not_in_optimizer(trained_with(tmp_path, model, head, trunk)) == []


def test_the_reason_why_a_parameter_is_omitted(tmp_path: Path) -> None:
    model = small_model()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    scale = model.get_parameter("2.weight")
    optimizer = torch.optim.SGD([*weights, scale], lr=0.1)
    hook = Hook(tmp_path)
    hook.watch(model, optimizer)
    for step, (x, y) in enumerate(batches(THREE_REPORTS)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 30:
            del optimizer.param_groups[0]["params"][1]
    run = recorded(hook)
    assert not_in_optimizer(run) == [
        "0.bias:not_in_optimizer",
        "2.bias:not_in_optimizer",
        "3.bias:not_in_optimizer",
        "3.weight:not_in_optimizer",
    ]

    def column(tensor: str, name: str) -> list[float]:
        numbers: list[float] = (
            run.tensor(f"{tensor}:not_in_optimizer").statistics()[f"probe.{name}"].to_pylist()
        )
        return numbers

    # Steps 0, 25 and 50, and five whole steps from 31 on, where a parameter has left the optimizer.
    assert column("3.weight", "was_optimized") == [1.0] * 6
    assert column("0.bias", "was_optimized") == [0.0] * 8
    assert column("0.bias", "weight_optimized") == column("3.bias", "after_optimized") == [1.0] * 8
    assert column("2.bias", "weight_optimized") == [0.0] * 8
    assert column("3.bias", "weight_optimized") == [1.0, 1.0, *[0.0] * 6]
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert column("0.bias", "optimized_share")[-1] == (8 * 16 + 16) / elements


def test_nothing_is_recorded_if_optimizers_have_all_parameters(tmp_path: Path) -> None:
    model = small_model()
    assert not_in_optimizer(trained_with(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))) == []


def test_an_optimizer_of_a_copy_leaves_all_parameters_outside(tmp_path: Path) -> None:
    model = small_model()
    run = trained_with(tmp_path, model, torch.optim.SGD(small_model().parameters(), lr=0.1))
    assert not_in_optimizer(run) == sorted(f"{name}:not_in_optimizer" for name, _ in model.named_parameters())
    assert run.tensor("3.weight:not_in_optimizer").statistics().to_pydict()["step"] == [0, 25, 50]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_replica_that_checks_parameters_states_whether_bad_gradients_were_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    place = ParameterPlacement(Placement(replica=rank), Placement(replica=rank, stage="reduced"), 2)
    monkeypatch.setattr("watchstep.pytorch.names.replica", lambda _group=None: place)
    model, optimizer = with_sgd(small_model())
    with Hook(tmp_path, run="r", config=EVERY_STEP) as hook:
        hook.watch(model, optimizer, replicated=True)
        for number, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.fill_(torch.nan) if number else x), y).backward()
            optimizer.step()
    run = recorded(hook)
    if rank:
        assert NONFINITE_APPLIED not in run.tensors()
    else:
        assert run.tensor(NONFINITE_APPLIED).statistics()["mean"].to_pylist() == [1.0, 1.0]
