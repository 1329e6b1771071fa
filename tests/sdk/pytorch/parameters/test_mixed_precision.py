"""Gradient scalers and autocast: which steps count, and that gradients are recorded without the scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tests.rules.runs import all_at_once
from tests.sdk.training import EVERY_STEP, batches, recorded, small_model, watching, with_sgd
from watchstep import CaptureConfig, Run, StopTraining
from watchstep.format.control import StopRequest
from watchstep_rules.config.rule_config import RuleConfig

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-2, **options),
    "Adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-2, **options),
    "SGD": lambda parameters, **options: torch.optim.SGD(parameters, lr=0.1, **options),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(),
            reason="NO GPU HERE: values that arrive later are not proven by this run",
        ),
    ),
]
WAYS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "as PyTorch chooses": {},
}


@dataclass
class Scaled:
    """A training with a gradient scaler, or without.

    Attributes:
        scale: at first; it halves at an overflow, and doubles after four good steps. None for no scaler.
        overflows: steps whose loss the program makes so large that gradients overflow.
        unscales: whether the program itself calls ``unscale_``.
        half: whether the forward pass is in float16.
        backoff: by which the scale is multiplied at an overflow.
    """

    optimizer: str = "AdamW"
    way: str = "as PyTorch chooses"
    scale: float | None = 1024.0
    overflows: tuple[int, ...] = ()
    unscales: bool = False
    half: bool = False
    backoff: float = 0.5
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.model = small_model().to(self.device)
        self.updates = OPTIMIZERS[self.optimizer](self.model.parameters(), **WAYS[self.way])
        enabled, scale = self.scale is not None, self.scale or 1.0
        self.scaler = GradScaler(self.device, scale, 2.0, self.backoff, 4, enabled=enabled)
        self.losses: list[float] = []
        self.scales: list[float] = []

    def run(self, steps: int, each: Callable[[int, Tensor], None] | None = None) -> list[float]:
        for step, (x, y) in enumerate((x.to(self.device), y.to(self.device)) for x, y in batches(steps)):
            self.updates.zero_grad()
            with torch.autocast(self.device, torch.float16, enabled=self.half):
                loss = nn.functional.cross_entropy(self.model(x), y)
            scaled = self.scaler.scale(loss)
            (scaled * torch.inf if step in self.overflows else scaled).backward()
            self.scales.append(self.scaler.get_scale())
            if self.unscales:
                self.scaler.unscale_(self.updates)
            self.scaler.step(self.updates)
            self.scaler.update()
            self.losses.append(loss.item())
            if each is not None:
                each(step, loss)
        return self.losses


def record(training: Scaled, store: Path, steps: int = 6, config: CaptureConfig = EVERY_STEP) -> Run:
    hook = watching(store, training.model, training.updates, config=config)
    training.run(steps)
    return recorded(hook)


def values(run: Run, name: str) -> dict[int, float]:
    table = run.tensor(name).statistics()
    return dict(zip(table["step"].to_pylist(), table["mean"].to_pylist(), strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_is_a_step_without_gradients_and_updates(
    way: str, device: str, tmp_path: Path
) -> None:
    training = Scaled(way=way, overflows=(0, 3), device=device)
    run = record(training, tmp_path)
    assert run.steps() == list(range(6))
    assert values(run, "gradient_scaler:skipped") == {0: 1.0, 3: 1.0}
    scales = {0: 1024.0, 1: 512.0, 4: 256.0} if device == "cpu" else {0: 1024.0, 3: 512.0}
    if device == "cuda" and way == "fused":
        del scales[3]  # arrives too late
    assert values(run, "gradient_scaler:scale") == scales
    assert run.tensor("loss").steps() == list(range(6))
    for name in ("0.weight:gradient", "0.weight:update"):
        assert run.tensor(name).steps() == [1, 2, 4, 5]
    assert run.tensor("0.weight").steps() == list(range(6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_overflow_is_no_fault(way: str, device: str, tmp_path: Path) -> None:
    training = Scaled(way=way, scale=2.0**26, half=True, device=device)
    run = record(training, tmp_path, steps=24)
    assert len(run.tensor("gradient_scaler:skipped").steps()) > 3
    assert run.tensor("0.weight:gradient").steps()
    assert all_at_once(RuleConfig(name="finite", rule="nan_or_inf"), run.rows()).findings == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_recorded_without_the_scale(
    optimizer: str, way: str, unscales: bool, scale: float, device: str, tmp_path: Path
) -> None:
    plain = record(Scaled(optimizer, way, scale=None, device=device), tmp_path / "plain", 3).rows()
    training = Scaled(optimizer, way, scale=scale, unscales=unscales, device=device)
    scaled = record(training, tmp_path / "scaled", 3).rows()
    for block in (plain, scaled):
        assert len(block)
    expected, found = ({key(block, row): row for row in range(len(block))} for block in (plain, scaled))
    assert expected.keys() <= found.keys()
    for place, row in expected.items():
        if not place[0].endswith(":gradient"):
            continue
        other = found[place]
        for figure in ("count", "nan", "zero"):
            assert getattr(plain.statistics, figure)[row] == getattr(scaled.statistics, figure)[other]
        for figure in ("min", "max", "abs_sum", "square_sum"):
            assert getattr(scaled.statistics, figure)[other] == pytest.approx(
                getattr(plain.statistics, figure)[row], rel=1e-3
            )
        assert spread(plain, row) == pytest.approx(spread(scaled, other), abs=0.2)


def key(block: Any, row: int) -> tuple[str, int]:
    return block.info(row).name, int(block.step[row])


def spread(block: Any, row: int) -> float:
    """The mean exponent."""
    bins, counts = block.statistics.histogram.row(row)
    return float(np.average(bins >> 1, weights=counts)) if len(bins) else 0.0


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-3])
def test_a_power_of_two_is_taken_out_exactly(scale: float, tmp_path: Path) -> None:
    runs = [
        record(Scaled("SGD", way, scale=scale), tmp_path / str(number), 1).rows()
        for number, way in enumerate(("fused", "foreach"))
    ]
    for row in range(len(runs[0])):
        if runs[0].info(row).role == "gradient":
            assert runs[0].statistics.max[row] == runs[1].statistics.max[row]
            first, second = (run.statistics.histogram.row(row) for run in runs)
            assert [first[0].tolist(), first[1].tolist()] == [second[0].tolist(), second[1].tolist()]


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("device", DEVICES)
def test_training_is_the_same(optimizer: str, way: str, device: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scale": 2.0**24, "half": True, "overflows": (7,), "device": device}
    watched, plain = Scaled(optimizer, way, **options), Scaled(optimizer, way, **options)
    record(watched, tmp_path, steps=25)
    assert watched.losses == plain.run(25)
    assert watched.scales == plain.scales
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_a_stop_is_obeyed_at_a_skipped_step(way: str, tmp_path: Path) -> None:
    training = Scaled(way=way, overflows=(2,))
    hook = watching(tmp_path, training.model, training.updates, on_stop="raise")
    hook._recorder.request_stop(StopRequest("attempt", 2, "enough"))
    with pytest.raises(StopTraining):
        training.run(6)
    assert len(training.losses) == 2
    assert recorded(hook).steps() == [0, 1, 2]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU HERE: that nothing waits is not proven by this run"
)
def test_a_fused_step_waits_for_nothing(tmp_path: Path) -> None:
    class Watched(GradScaler):
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return super().step(optimizer, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    training = Scaled(way="fused", overflows=(2,), device="cuda")
    record(training, tmp_path / "warm")
    training.scaler = Watched("cuda", 1024.0)
    assert values(record(training, tmp_path / "run"), "gradient_scaler:skipped") == {2: 1.0}


def test_a_scaler_made_before_and_a_subclass(tmp_path: Path) -> None:
    class Mine(GradScaler):
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

    training = Scaled(overflows=(1,))
    training.scaler = Mine("cpu", 8.0)
    assert values(record(training, tmp_path, 3), "gradient_scaler:skipped") == {1: 1.0}


def test_a_disabled_scaler_records_nothing_of_itself(tmp_path: Path) -> None:
    training = Scaled(scale=None)
    hook = watching(tmp_path, training.model, training.updates)
    training.run(3)
    run = recorded(hook)
    assert hook.health["notes"] == {}
    assert not [name for name in run.tensors() if name.startswith("gradient_scaler")]
    assert run.steps() == [0, 1, 2]


def test_metrics_that_are_not_wanted_are_not_recorded(tmp_path: Path) -> None:
    config = CaptureConfig(
        collections={
            name: collection for name, collection in EVERY_STEP.collections.items() if name != "metrics"
        },
        overhead_budget=None,
    )
    assert "metrics" not in record(Scaled(overflows=(1,)), tmp_path, 3, config).collections


@pytest.mark.ci
def test_a_compiled_optimizer_step_is_not_taken_for_a_skipped_one(tmp_path: Path) -> None:
    torch.compiler.reset()
    training = Scaled()
    vars(training.updates)["step"] = torch.compile(training.updates.step, backend="aot_eager")
    run = record(training, tmp_path, 3)
    assert "gradient_scaler:skipped" not in run.collections.get("metrics", [])
    torch.compiler.reset()


def test_two_optimizers_of_one_scaler(tmp_path: Path) -> None:
    model = small_model()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    scaler = GradScaler("cpu", 8.0)
    hook = watching(tmp_path, model, first)
    for step, (x, y) in enumerate(batches(4)):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step == 1:
            model[3].weight.grad.fill_(torch.inf)  # type: ignore[union-attr, operator]
        scaler.step(second)
        scaler.step(first)
        scaler.update()
    run = recorded(hook)
    assert run.steps() == [0, 1, 2, 3]
    assert values(run, "gradient_scaler:skipped") == {1: 1.0}
    assert run.tensor("0.weight:gradient").steps() == [0, 1, 2, 3]
    assert run.tensor("3.weight:gradient").steps() == [0, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_under_autocast_are_recorded_once_in_their_type(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, optimizer = with_sgd(small_model())
    hook = watching(tmp_path, model, optimizer)
    for x, y in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    run = recorded(hook)
    name = str(dtype).removeprefix("torch.")
    assert [run.tensor(f"{place}:output").info.dtype for place in (0, 1, 3)] == [name] * 3
    assert run.tensor("0.weight").info.dtype == run.tensor("0.weight:gradient").info.dtype == "float32"
    table = run.tensor("0:output").statistics()
    assert table["count"].to_pylist() == [32 * 16] * 3
    assert table["step"].to_pylist() == [0, 1, 2]
