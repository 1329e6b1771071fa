"""Probes of single elements that rules request, and that no probe changes a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.sdk.pytorch.probes.test_probes import collected
from tests.sdk.training import EVERY_STEP, watching, with_sgd
from watchstep import Cadence, CaptureConfig, Hook, StopTraining, open_run
from watchstep.capture.config import PROBES, element_probe, parsed
from watchstep.errors import ConfigError
from watchstep.format.capture_needs import CaptureNeed, decoded, encoded
from watchstep.pytorch.probes.activations import UnitActivity
from watchstep.pytorch.probes.weights import PercentileRange, Unchanged, WeightChange
from watchstep.wrapper.environment import AttemptLaunch, environment

FEW = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("inactive_units", (1.0,)), ("saturated_units", ("Tanh", -9.5, 9.5, 1.0)), ("weight_change", (3, 1e-9))],
)
def test_a_name_contains_the_kind_and_its_arguments(kind: str, arguments: tuple[str | float, ...]) -> None:
    probe = parsed(element_probe(kind, *arguments))
    assert probe is not None
    assert (probe.kind, probe.arguments) == (kind, arguments)


@pytest.mark.parametrize(
    "name", ["inactive_units", "inactive_units:many", "unchanged:1e-5:1e-8:perhaps", "input_variance:1"]
)
def test_arguments_that_are_wrong_are_an_error_that_states_which_are_right(name: str) -> None:
    with pytest.raises(ConfigError, match="invalid arguments"):
        CaptureConfig(probes=(name,))
    with pytest.raises(ConfigError, match="unknown"):
        CaptureConfig(probes=("activity:1.0",))


@example([[[0.0] * 6]], 2.6e-264)
@given(
    batches=st.lists(st.lists(FEW, min_size=1, max_size=5), min_size=1, max_size=3), percent=st.floats(0, 100)
)
def test_units_are_counted_over_all_micro_batches_of_a_step(
    batches: list[list[list[float]]], percent: float
) -> None:
    probe = UnitActivity("ReLU", (element_probe("inactive_units", percent),))
    for batch in batches:
        results = probe.measure(None, torch.tensor(batch), 0, "train")
    whole = np.concatenate([np.array(batch) for batch in batches])
    inactive = (100 * (whole > 0).sum(0) < percent * len(whole)).sum()
    name = element_probe("inactive_units", percent)
    assert {key: float(value[0]) for key, value in collected(results).items()} == {
        "units": 6.0,
        name: inactive,
    }
    again = probe.measure(None, torch.ones(2, 6), 1, "train")  # the next step begins anew
    assert collected(again)[name] == 0


@given(first=FEW, second=FEW, rtol=st.floats(0, 0.5), atol=st.floats(0, 1))
def test_elements_are_compared_as_numpy_does(
    first: list[float], second: list[float], rtol: float, atol: float
) -> None:
    probe = Unchanged((element_probe("unchanged", rtol, atol, "False"),))
    results = [probe.measure(["a"], [torch.tensor(values)], 1) for values in (first, second)]
    close = [
        column.collect()[element_probe("unchanged", rtol, atol, "False")].tolist()
        for column in results
        if column
    ]
    old, new = (np.array(values, np.float32).astype(np.float64) for values in (first, second))
    assert close == [[0.0], [float(np.allclose(new, old, rtol=rtol, atol=atol))]]


@given(elements=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60))
def test_percentiles_are_interpolated_as_numpy_does(elements: list[float]) -> None:
    probe = PercentileRange((element_probe("percentile_range", 2),))
    gradient = torch.tensor(elements)
    results = collected(probe.measure(["a"], [gradient], 1, 5))
    high, low = np.percentile(gradient.double().numpy(), [95, 5])
    assert results["percentile_range:2"][0] == pytest.approx(high - low, rel=1e-4, abs=1e-3)
    assert probe.measure(["a"], [gradient], 1, 7) is None  # its first steps are over
    spoilt = PercentileRange((element_probe("percentile_range", 1),)).measure(
        ["a"], [torch.tensor([*elements, float("nan")])], 1, 0
    )
    assert np.isnan(collected(spoilt)["percentile_range:1"][0])


def test_a_change_is_compared_with_the_oldest_record_within_its_steps() -> None:
    probe = WeightChange((element_probe("weight_change", 3, 1e-9), element_probe("weight_change", 0, 1e-9)))
    ratios = []
    for step, value in ((0, 1.0), (2, 2.0), (3, 4.0), (9, 5.0)):
        results = collected(probe.measure(["a"], [torch.tensor([value])], 1, step))
        ratios.append([round(float(column[0]), 6) for column in results.values()])
    assert ratios == [[-1.0, -1.0], [1.0, 1.0], [3.0, 1.0], [-1.0, 0.25]]


class Calls(nn.Module):
    """Calls its activations as functions, two in one method and one in a submodule."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.part.forward = self.rectified  # type: ignore[method-assign, assignment]
        self.fails = fails

    def rectified(self, inputs: Tensor) -> Tensor:
        """What the part does."""
        return torch.relu(nn.functional.linear(inputs, self.part.weight))

    def forward(self, inputs: Tensor) -> Tensor:
        """Two calls, and one inside."""
        hidden = torch.sigmoid(torch.relu(self.part(inputs)))
        if self.fails:
            raise RuntimeError("no")
        return hidden


CALLS = CaptureConfig(overhead_budget=None, probes=("channels", "function_calls"))


def test_calls_of_functions_are_recorded_by_module_and_number_and_modules_not_twice(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Calls())
    with watching(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), config=CALLS) as hook:
        model(torch.randn(8, 4)).sum().backward()
    rows = open_run(hook.run_url).rows()
    found = {
        info.name: info.module_type
        for info in rows.catalogue
        if "relu" in info.name or "sigmoid" in info.name
    }
    assert found == {"2:relu_0": "ReLU", "2:relu_1": "ReLU", "2:sigmoid_0": "Sigmoid"}
    assert sum(info.module_type == "ReLU" and info.role == "output" for info in rows.catalogue) == 3


def test_a_pass_that_fails_leaves_no_mode_behind(tmp_path: Path) -> None:
    model = Calls(fails=True)
    with watching(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), config=CALLS) as hook:
        with pytest.raises(RuntimeError, match="no"):
            model(torch.randn(8, 4))
        assert torch.overrides._get_current_function_mode() is None
        model.fails = False
        model(torch.randn(8, 4)).sum().backward()
    assert not hook.health["faults"]
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_partly_compiled_model_is_not_hooked(tmp_path: Path) -> None:
    compiled: nn.Module = torch.compile(nn.Linear(4, 4), backend="eager")  # type: ignore[assignment]
    model = nn.Sequential(compiled, Calls())
    with watching(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), config=CALLS) as hook:
        model(torch.randn(8, 4)).sum().backward()
    assert "is compiled" in hook.health["notes"]["function_calls"]
    assert not any("relu" in info.name for info in open_run(hook.run_url).rows().catalogue)


@pytest.mark.ci
def test_a_hook_measures_what_its_rules_and_its_launcher_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.yaml").write_text(
        "rules:\n  - {rule: sagemaker_dead_relu, params: {threshold_inactivity: 2}}\n", encoding="utf-8"
    )
    launched = CaptureNeed("tokens", ("inputs",), ("token_count:3", "function_calls"))
    monkeypatch.setenv("WATCHSTEP_NEEDS", encoded([launched]))
    with Hook(tmp_path, rules=tmp_path / "rules.yaml") as hook:
        wanted = [probe for probe in hook.config.probes if parsed(probe) is not None]
    assert wanted == ["function_calls", "inactive_units:2.0", "token_count:3"]


def test_a_guard_judges_by_elements_before_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        "rules: [{rule: sagemaker_dead_relu, actions: [stop]}]", encoding="utf-8"
    )
    model, optimizer = with_sgd(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), 0.0)

    def train(hook: Hook) -> None:
        hook.watch(model, optimizer)
        for step in range(5):
            if step == 2:
                nn.init.constant_(model.get_parameter("0.bias"), -99.0)
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()

    every_step = CaptureConfig(overhead_budget=None)
    with (
        Hook(tmp_path, guard=tmp_path / "rules.yaml", config=every_step) as hook,
        pytest.raises(StopTraining) as stopped,
    ):
        train(hook)
    assert "1:output" in str(stopped.value)
    assert hook.stopped is not None
    assert hook.stopped.step == 2


def test_a_launch_adds_the_needs_of_its_rules_to_the_config() -> None:
    outer = CaptureNeed("outer", ("optimizer_state",), every=10)
    inner = CaptureNeed("inner", ("inputs",), ("token_count:3", "function_calls"))
    launch = AttemptLaunch("file:///runs", "default", "mine", "a", needs=(inner,))
    variables = environment(launch, {"WATCHSTEP_NEEDS": encoded([outer])})
    assert decoded(variables["WATCHSTEP_NEEDS"]) == (outer, inner)
    assert "WATCHSTEP_NEEDS" not in environment(AttemptLaunch("file:///runs", "default", "mine", "a"), {})


def test_needs_of_a_launcher_add_collections_and_full_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = [
        CaptureNeed("moments", ("optimizer_state",), every=10),
        CaptureNeed("own", ("mine",), every=5),
    ]
    monkeypatch.setenv("WATCHSTEP_NEEDS", encoded(launched))
    with Hook(tmp_path) as hook:
        assert hook.config.chosen["optimizer_state"].tensors == Cadence(every=10)
        assert "mine" not in hook.config.chosen


@pytest.mark.parametrize("text", ["[", "{}", '[{"rule": 1}]', '[{"every": -1}]', "[" * 100_000])
def test_invalid_needs_of_a_launcher_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("WATCHSTEP_NEEDS", text)
    with pytest.raises(ConfigError, match="WATCHSTEP_NEEDS is not valid"):
        Hook(tmp_path)


STEPS = 60


class Reader(nn.Module):
    """Tokens, normalisation, a layer with equal initial weights, and a layer that is in no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 6)
        self.norm, self.not_in_optimizer, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)
        nn.init.constant_(self.inner.weight, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.inner(self.words(tokens).mean(1))))
        scores: Tensor = self.head(self.not_in_optimizer(hidden))
        return scores


def losses(hook: Hook | None, *, clears: bool, steps: int = STEPS) -> list[float]:
    torch.manual_seed(0)
    model = Reader()
    chosen = [p for name, p in model.named_parameters() if "not_in_optimizer" not in name]
    optimizer = torch.optim.SGD(chosen, lr=0.01, momentum=0.9)
    if hook is not None:
        hook.watch(model, optimizer)
    found = []
    for _ in range(steps):
        tokens, labels = torch.randint(0, 20, (16, 5)), torch.randint(0, 3, (16,))
        if clears:
            optimizer.zero_grad(set_to_none=False)
        outputs = model(tokens)
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        if hook is not None:
            hook.record(labels=labels, outputs=outputs)
        optimizer.step()
        found.append(loss.item())
    return found


ELEMENTS = CaptureConfig(
    overhead_budget=None,
    probes=(
        *PROBES,
        element_probe("inactive_units", 1.0),
        element_probe("saturated_units", "Tanh", -9.5, 9.5, 1.0),
        element_probe("unchanged", 1e-5, 1e-8, "False"),
        element_probe("weight_change", 3, 1e-9),
        element_probe("token_count", 0),
        element_probe("channel_sum", 1),
        element_probe("percentile_range", 10),
        "input_variance",
        "function_calls",
    ),
)


@pytest.mark.ci
@pytest.mark.parametrize("config", [EVERY_STEP, CaptureConfig(), ELEMENTS])
@pytest.mark.parametrize("clears", [True, False])
def test_losses_are_the_same(config: CaptureConfig, clears: bool, tmp_path: Path) -> None:
    with Hook(tmp_path, config=config) as hook:
        watched = losses(hook, clears=clears, steps=30)
    assert hook.health["faults"] == {}
    assert watched == losses(None, clears=clears, steps=30)
