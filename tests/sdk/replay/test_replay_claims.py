"""A replay states only what it has compared: what was not restored is named, and a computation that differs has no diagnosis."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from watchstep import CaptureConfig, Hook
from watchstep.capture.config import Bundles
from watchstep.errors import ConfigError
from watchstep.format.bundle import Bundle, bundle_keys, open_bundle
from watchstep.store.store import Store

ALL_NONFINITE = "their equality does not show that it is the same failure"


def linear(bias: float = 0.5) -> Any:
    """A small model with the same weights at each call."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.bias, bias)
    return model


def two_layers() -> Any:
    """Two layers side by side: the gradients of one are finite if the other fails."""
    import torch

    return torch.nn.ModuleList([linear(), linear()])


def counting() -> Any:
    """A model that fails in its first call only, because of a counter in an attribute."""
    import torch

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            result: torch.Tensor = self.layer(torch.log(0 * x) if self.calls == 1 else x)
            return result

    return Counting()


def initializing() -> Any:
    """A model that sets its scale from its first batch, as ActNorm does."""
    import torch

    class Initializing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2))
            self.is_initialized = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_initialized:
                with torch.no_grad():
                    self.scale.copy_(torch.reciprocal(x.std(0)))
                self.is_initialized = True
            return x * self.scale

    return Initializing()


def embedding() -> Any:
    """A model whose gradient is sparse."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Embedding(4, 2, sparse=True)


def squared(model: Any, batch: Any) -> Any:
    """The loss of a batch."""
    return (model(batch[0]) - 1).square().mean()


def recorded(
    folder: Path,
    model: Any,
    batch: Any,
    loss: Callable[[Any, Any], Any] = squared,
    *,
    change: Callable[[Any], object] = lambda _model: None,
    kind: str = "SGD",
    redact: tuple[str, ...] = (),
    is_requested: bool = False,
) -> Bundle:
    """Train one step, and return its bundle.

    Args:
        folder: The store.
        model: The model.
        batch: Its batch.
        loss: The loss of the batch.
        change: Changes the model between the backward pass and the update.
        kind: Class of the optimizer.
        redact: Values that the bundle lacks.
        is_requested: Whether the program requests the bundle; else the step fails.
    """
    import torch

    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    config = CaptureConfig(bundles=Bundles(redact=redact))
    with Hook(folder, config=config, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        if is_requested:
            hook.bundle()
        hook.batch(batch)
        loss(model, batch).backward()
        change(model)
        optimizer.step()
    store = Store.open(hook.run_url)
    (key,) = bundle_keys(store)
    return open_bundle(store, key.path)


def replayed(
    bundle: Bundle, model: Any, loss: Callable[[Any, Any], Any] = squared, precision: Any = "captured"
) -> tuple[Any, str]:
    """Replay a bundle. Returns the result, and its text."""
    from watchstep import ReplayStep
    from watchstep.replay import render_replay, replay

    result = replay(bundle, ReplayStep(model, loss), precision=precision)
    return result, render_replay(result)


def inputs(value: float = 1.0) -> list[Any]:
    """A batch of one tensor."""
    import torch

    return [torch.tensor([[value, 2.0], [1.0, 3.0]])]


def test_attributes_of_the_model_are_the_same_in_the_traced_computation(tmp_path: Path) -> None:
    result, text = replayed(recorded(tmp_path, counting(), inputs()), counting())
    assert result.is_exact
    assert result.trace_difference == ""
    assert "first bad operation: aten.log.default" in text
    assert ALL_NONFINITE in text


def test_a_parameter_that_the_bundle_lacks_is_traced_from_its_first_value(tmp_path: Path) -> None:
    result, text = replayed(recorded(tmp_path, initializing(), inputs()), initializing())
    assert result.are_equal
    assert not result.is_exact
    assert result.unrestored == ("parameter 'scale'",)
    assert (
        "reproduced: yes, the step is not finite again, and all compared values are equal bit for bit; not"
        in text
    )
    assert "first bad operation: aten.reciprocal.default" in text
    assert "was not finite before the step" not in text


@pytest.mark.parametrize("kind", ["Adam", "SGD", ""])
def test_what_changes_gradients_before_the_update_is_named(tmp_path: Path, kind: str) -> None:
    import torch

    from watchstep import ReplayStep
    from watchstep.replay import render_replay, replay

    def normalize(model: Any) -> None:
        norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
        for parameter in model.parameters():
            parameter.grad.div_(norm)

    def zero(model: Any, batch: Any) -> Any:
        return 0 * squared(model, batch)

    def optimizer(model: Any) -> Any:
        return getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    bundle = recorded(tmp_path, linear(), inputs(), zero, change=normalize, kind=kind or "SGD")
    step = ReplayStep(linear(), zero, before_update=normalize, optimizer=optimizer if kind else None)
    result = replay(bundle, step)
    assert result.is_reproduced
    assert result.diagnosis is not None
    first = result.diagnosis.first
    assert first is not None
    assert (first.operation.name, first.operation.phase) == ("aten.div_.Tensor", "gradients")
    assert first.reaches.startswith("gradient of ")
    assert result.diagnosis.contained == ()
    text = render_replay(result)
    assert "parameter.grad.div_(norm)" in text
    assert "input 0: float32 1x2: finite\n" in text


def test_a_computation_that_differs_from_the_compared_one_has_no_diagnosis(tmp_path: Path) -> None:
    import torch

    calls = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        bad = model[0](torch.log(0 * batch[0]) if calls == 1 else batch[0])
        return bad.square().mean() + model[1](batch[0]).square().mean()

    bundle = recorded(tmp_path, two_layers(), inputs(), loss)
    calls = 0
    result, text = replayed(bundle, two_layers(), loss)
    assert calls == 2
    assert result.diagnosis is None
    assert "loss of micro-batch 0" in result.trace_difference
    assert "no first bad operation: " in text
    assert "first bad operation: aten" not in text
    assert any("not the one that was compared" in note for note in result.trace.notes)

    def failing(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("the second call")
        return model[0](torch.log(0 * batch[0])).square().mean() + model[1](batch[0]).square().mean()

    calls = 0
    result, text = replayed(bundle, two_layers(), failing)
    assert result.is_exact
    assert "no first bad operation: " in text
    assert "it raised ValueError: the second call" in text


def test_a_failure_with_other_weights_is_not_known_to_be_the_same(tmp_path: Path) -> None:
    import torch

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch[0]).sqrt() - batch[1]).square().mean()

    batch = [torch.ones(2, 2), torch.tensor([[torch.nan], [1.0]])]
    bundle = recorded(tmp_path, linear(9.0), batch, loss, change=decayed)
    result, text = replayed(bundle, linear(-9.0), loss)
    assert result.are_equal
    assert not result.is_reproduced
    assert "reproduced: not known: the step fails again" in text
    assert ALL_NONFINITE in text
    assert "not restored: parameter 'weight', parameter 'bias'" in text
    assert "of the replay, whose failure is not known to be that of the step:\nfirst bad operation" in text


def decayed(model: Any) -> None:
    """Decay the weights, between the backward pass and the update."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("kind", ["parameter", "sparse", "redacted"])
def test_what_is_missing_of_a_finite_step_is_named(tmp_path: Path, kind: str) -> None:
    import torch

    build = embedding if kind == "sparse" else linear
    batch = [torch.tensor([1, 2])] if kind == "sparse" else inputs()
    bundle = recorded(
        tmp_path,
        build(),
        batch,
        change=decayed if kind == "parameter" else lambda _model: None,
        redact=("gradients/weight",) if kind == "redacted" else (),
        is_requested=True,
    )
    result, text = replayed(bundle, build())
    assert result.is_reproduced
    assert not result.is_exact
    missing = "restored: parameter 'weight'" if kind == "parameter" else "compared: gradient 'weight'"
    assert f"reproduced: yes, all compared values are equal bit for bit; not {missing}" in text


@pytest.mark.parametrize("is_known", [False, True])
def test_a_failure_without_a_finite_value_is_reproduced_if_all_was_restored(
    tmp_path: Path, *, is_known: bool
) -> None:
    import torch

    change = (lambda _model: None) if is_known else decayed
    bundle = recorded(tmp_path, linear(), inputs(torch.nan), change=change, redact=("gradients/weight",))
    result, text = replayed(bundle, linear())
    assert result.is_reproduced == is_known
    assert not result.is_exact
    assert ALL_NONFINITE in text
    assert "not compared: gradient 'weight'" in text
    assert ("reproduced: not known" in text) == (not is_known)


class Unobserved:
    """A loss whose gradients are computed without ``backward()``, so that it is not recorded."""

    def __init__(self, model: Any, batch: Any) -> None:
        self._loss, self._parameters = squared(model, batch), list(model.parameters())

    def backward(self) -> None:
        """Compute the gradients."""
        import torch

        gradients = torch.autograd.grad(self._loss, self._parameters)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_replay_that_compares_nothing_is_not_known_to_reproduce_a_step(
    tmp_path: Path, value: float
) -> None:
    bundle = recorded(
        tmp_path, linear(), inputs(value), Unobserved, redact=("gradients/*",), is_requested=value == 1.0
    )
    result, text = replayed(bundle, linear(), lambda model, batch: 5 * squared(model, batch))
    assert not result.is_reproduced
    assert "reproduced: not known: " in text
    assert "neither losses nor gradients are" in text


def test_a_batch_that_was_changed_in_place_is_an_error_with_a_hint(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        batch[0].div_(batch[0].sum(1, keepdim=True))
        return squared(model, batch)

    bundle = recorded(tmp_path, linear(), [0 * inputs()[0]], loss)
    with pytest.raises(ConfigError, match=r"the batch of micro-batch 0: .* changed in place") as raised:
        replayed(bundle, linear(), loss)
    assert "change a copy of it" in raised.value.hint


@pytest.mark.parametrize("draws", [False, True])
def test_a_lost_random_state_counts_if_it_is_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, draws: bool
) -> None:
    from watchstep.pytorch.bundles.bundler import _BundleContent

    lose = _BundleContent._micro_batch  # what is lost otherwise depends on the time between two passes

    def micro_batch(self: Any, number: int, batch: Any) -> dict[str, Any]:
        data = lose(self, number, batch)
        data["random"]["dict"] = [
            [name, None if name in {"python", "numpy"} else state] for name, state in data["random"]["dict"]
        ]
        return data

    monkeypatch.setattr(_BundleContent, "_micro_batch", micro_batch)

    def loss(model: Any, batch: Any) -> Any:
        if draws:
            random.random()
        return squared(model, batch)

    result, text = replayed(recorded(tmp_path, linear(), inputs(), loss, is_requested=True), linear(), loss)
    assert result.are_equal
    assert result.is_exact == (not draws)
    assert ("random numbers of python" in result.unrestored) == draws
    assert ("the state of the random numbers of python is not known" in text) == draws


def test_a_value_of_another_dtype_is_named(tmp_path: Path) -> None:
    import torch

    model = linear().double()
    bundle = recorded(tmp_path, model, [inputs()[0].double()], is_requested=True)
    result, text = replayed(
        bundle, linear(), lambda model, batch: squared(model, [batch[0].to(torch.float32)])
    )
    assert not result.is_exact
    assert "dtype of parameter 'weight'" in result.unrestored
    assert "parameter 'weight' was torch.float64, the program's is torch.float32" in text


def test_the_state_of_a_model_is_restored() -> None:
    import torch

    from watchstep.replay.model_state import ModelState

    model = torch.nn.Sequential(torch.nn.LSTM(2, 2), torch.nn.BatchNorm1d(2), linear())
    first: Any = model[0]
    layer: Any = model[2]
    layer.lock = lock = threading.Lock()
    layer.seen = {"names": ["a"], "weight": layer.weight, "mean": torch.zeros(2)}
    layer.generator = torch.Generator().manual_seed(3)
    calls: list[int] = []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    state = ModelState(model, [layer.bias])
    weight = layer.weight
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))

    layer.seen["names"].append("b")
    layer.seen["mean"].add_(1)
    torch.rand(5, generator=layer.generator)
    layer.later = 1
    handle.remove()
    layer.weight = torch.nn.Parameter(torch.zeros(1, 2))
    del model[1]
    with torch.no_grad():
        layer.bias.fill_(7)

    state.restore()
    assert layer.seen["names"] == ["a"]
    assert layer.seen["weight"] is layer.weight is weight
    assert layer.seen["mean"].tolist() == [0, 0]
    assert torch.equal(torch.rand(2, generator=layer.generator), expected)
    assert layer.lock is lock
    assert not hasattr(layer, "later")
    assert layer.bias.tolist() == [0.5]
    assert len(model) == 3
    assert all(mine is flat for mine, flat in zip(first.parameters(), first._flat_weights, strict=True))
    layer(torch.ones(1, 2))
    assert calls == [1]
    handle.remove()
    layer(torch.ones(1, 2))
    assert calls == [1]


def branching(model: Any, batch: Any) -> Any:
    """A loss that fails in one of two ways, by a random number that is drawn before the model is called."""
    import torch

    if torch.rand(()) < 0.5:
        return (model(batch[0]) * 0 / batch[0].sub(batch[0]).sum()).mean()
    return (model(batch[0]) * batch[0].sub(batch[0]).log().sub(1).sum()).square().mean()


@pytest.mark.parametrize("source", ["program", "loader"])
@pytest.mark.parametrize("seed", range(4))
def test_random_numbers_before_the_forward_pass_are_those_of_the_recorded_step(
    tmp_path: Path, source: str, seed: int
) -> None:
    import torch

    if source == "program":
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 1)
        batches: Any = [inputs()]
    else:
        dataset = torch.utils.data.TensorDataset(inputs()[0])
        model, batches = torch.nn.Linear(2, 1), torch.utils.data.DataLoader(dataset, batch_size=2)
        torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        for batch in batches:
            if source == "program":
                hook.batch(batch)
            state = torch.get_rng_state()
            is_division = bool(torch.rand(()) < 0.5)
            torch.set_rng_state(state)
            branching(model, batch).backward()
            optimizer.step()
    store = Store.open(hook.run_url)
    (key,) = bundle_keys(store)
    result, text = replayed(open_bundle(store, key.path), torch.nn.Linear(2, 1), branching)
    assert result.is_exact
    assert f"first bad operation: aten.{'div.Tensor' if is_division else 'log.default'}" in text


@pytest.mark.parametrize("generator", ["python", "torch"])
def test_random_numbers_before_the_forward_pass_that_are_not_recorded_are_named(
    tmp_path: Path, generator: str
) -> None:
    import torch

    draws_in_loss = False

    def loss(model: Any, batch: Any) -> Any:
        if draws_in_loss:
            batch = [batch[0] * (random.random() if generator == "python" else torch.rand(()))]
        return squared(model, batch)

    bundle = recorded(tmp_path, linear(), inputs(), loss, is_requested=True)
    assert replayed(bundle, linear(), loss)[0].is_exact
    draws_in_loss = True
    result, text = replayed(bundle, linear(), loss)
    assert result.unrestored == ("random numbers drawn before the forward pass",)
    assert f"random numbers of {generator} were drawn before the forward pass" in text
    assert "call hook.batch(…) just before the loss is computed" in text


@pytest.mark.ci
def test_the_states_at_the_batch_are_stored_only_if_random_numbers_were_drawn_since(tmp_path: Path) -> None:
    bundle = recorded(tmp_path / "a", linear(), inputs(), is_requested=True)
    assert "random_at_batch" not in bundle.document.micro_batches[0]
    bundle = recorded(tmp_path / "b", linear(), inputs(), branching)
    assert "random_at_batch" in bundle.document.micro_batches[0]


@pytest.mark.parametrize("other", ["loss", "gradient"])
def test_nan_and_infinity_are_other_failures(tmp_path: Path, other: str) -> None:
    import torch

    fails_as_nan = False

    def loss(model: Any, batch: Any) -> Any:
        value = squared(model, batch)
        bad = torch.tensor(torch.nan if fails_as_nan else torch.inf)
        return value * bad if other == "gradient" else value + bad

    bundle = recorded(tmp_path, linear(), inputs(), loss)
    assert replayed(bundle, linear(), loss)[0].is_reproduced
    fails_as_nan = True
    result, text = replayed(bundle, linear(), loss)
    assert not result.is_reproduced
    assert result.is_other_failure
    assert "reproduced: no: the step fails in another way" in text


def test_a_failure_with_other_gradients_is_not_known_to_be_the_same(tmp_path: Path) -> None:
    import torch

    is_other = False

    def loss(model: Any, batch: Any) -> Any:
        value = squared(model, batch)
        scale = torch.tensor([[torch.nan, 1.0 if is_other else torch.nan]])
        if model.weight.requires_grad:
            model.weight.register_hook(lambda gradient: gradient * scale)
        return value

    bundle = recorded(tmp_path, linear(), inputs(), loss)
    result, text = replayed(bundle, linear(), loss)
    assert result.is_exact
    is_other = True
    result, text = replayed(bundle, linear(), loss)
    assert result.fails_again
    assert not result.is_reproduced
    assert "reproduced: not known: the step fails again, but the compared values differ" in text
    assert "weight has elements that are finite, NaN or infinite in one of them only" in text


def test_without_finite_values_the_computation_that_is_compared_is_traced(tmp_path: Path) -> None:
    calls = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        result = model(batch[0])
        return (
            (result * 0 / (0 * batch[0]).sum()).mean() if calls % 2 else (result * 0).log().sub(1).mean() * 0
        )

    bundle = recorded(tmp_path, linear(), inputs(), loss)
    calls = 0
    result, text = replayed(bundle, linear(), loss)
    assert calls == 1
    assert result.is_exact
    assert "first bad operation: aten.div.Tensor" in text


PRECISION_CLAIM = "fails again in the captured precision, which is a part of the cause"


@pytest.mark.ci
def test_a_failure_of_range_is_finite_in_float64_and_fails_again_in_the_captured_precision(
    tmp_path: Path,
) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return (model[0](batch[0]) * 1e30).square().mean() + model[1](batch[0]).square().mean()

    result, text = replayed(recorded(tmp_path, two_layers(), inputs(), loss), two_layers(), loss, "fp64")
    assert result.captured == "fails again"
    assert f"reproduced: no: the step is finite in fp64, and {PRECISION_CLAIM}" in text


@pytest.mark.parametrize("kind", ["state", "counter", "random"])
def test_precision_is_no_cause_unless_the_step_fails_in_the_captured_one_alone(
    tmp_path: Path, kind: str
) -> None:
    import torch

    calls = 0
    is_recording = True

    def loss(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        bad = is_recording if kind == "state" else calls == 1
        if kind == "random":
            drawn = torch.rand(2, dtype=batch[0].dtype)
            bad = batch[0].dtype is torch.float32
            return model(batch[0]).square().mean() + drawn.sum() * (torch.nan if bad else 1.0)
        return model(batch[0]).square().mean() * (torch.inf if bad else 1.0)

    bundle = recorded(tmp_path, linear(), inputs(), loss)
    is_recording, calls = False, 0
    result, text = replayed(bundle, linear(), loss, "fp64")
    assert "reproduced: no: the step is finite in fp64" in text
    assert PRECISION_CLAIM not in text
    assert result.captured == {"state": "finite", "counter": "", "random": "fails again"}[kind]
    assert ("the replay in the captured precision is finite, too" in text) == (kind == "state")
    assert ("it draws random numbers, which may be others in this precision" in text) == (kind == "random")
