"""Programs whose objects raise or misbehave, models that are copied, passes without values, and concurrent trainings."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.processes import run_python
from tests.sdk.training import (
    EVERY_STEP,
    Composed,
    Training,
    batches,
    recorded,
    small_model,
    watched_training,
    watching,
    with_sgd,
)
from watchstep import Cadence, CaptureConfig, Collection, Hook, open_run
from watchstep.errors import ConfigError

X = torch.linspace(-1, 1, 64).view(8, 8)


def jagged(module: Any, x: Tensor) -> Any:
    """Gives a layer two sequences of different length."""
    return module.layer(torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)).values()


def transformed(model: nn.Module) -> None:
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        total: Tensor = torch.func.functional_call(model, dict(given), (x,)).sum()
        return total

    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)
    torch.func.jacrev(lambda x: model(x).sum(0))(X)


def pretended(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(X).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def weightless(model: nn.Module) -> None:
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    torch.func.functional_call(model, state, (X.to("meta"),))


BESIDES: dict[str, Callable[[nn.Module], None]] = {
    program.__name__: program for program in (transformed, pretended, weightless)
}


@pytest.mark.parametrize("name", BESIDES)
def test_passes_without_numbers_leave_no_trace(tmp_path: Path, name: str) -> None:
    hook, training = watched_training(tmp_path)
    losses = training.run(3, lambda *_: BESIDES[name](training.model))
    run = recorded(hook)
    assert losses == Training().run(3)
    assert run.tensor("0:output").statistics()["count"].to_pylist() == [32 * 16] * 3
    assert run.tensor("loss").statistics()["mean"].to_pylist() == losses


class WithoutInit(nn.Module):
    """Its constructor leaves out that of its base class."""

    def __init__(self) -> None:
        pass


class OwnModules(nn.Linear):
    """Overrides how modules are listed."""

    def named_modules(self, *_: Any, **__: Any) -> Any:
        raise AttributeError("no modules here")


class NoHooks(nn.Linear):
    """Takes no forward hooks."""

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


ODD: dict[str, Callable[[], nn.Module]] = {
    "without init": WithoutInit,
    "own modules": lambda: nn.Sequential(nn.Linear(8, 8), OwnModules(8, 2)),
}


@pytest.mark.parametrize("name", ODD)
def test_a_model_that_cannot_be_watched_is_reported_and_trains(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook, model = Hook(tmp_path, config=EVERY_STEP), ODD[name]()
    hook.watch(model)
    hook.watch(model)
    assert hook.health["counts"]["faults"] == 2
    assert len([record for record in caplog.records if "watch" in record.message]) == 1
    if not isinstance(model, WithoutInit):
        hooked = [m for m in model.children() if m._forward_hooks or m._forward_pre_hooks]
        assert not hooked
        assert not model._forward_hooks
        layers = [model, *model.children()]
        parameters = [
            parameter for layer in layers for parameter in layer._parameters.values() if parameter is not None
        ]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        model(X).sum().backward()
        optimizer.step()
        hook.log(loss=1.0)
    hook.close()


class PassesOn(nn.Module):
    """Passes attributes on to the module inside, or raises what it likes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(2, 1)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__["_modules"].get("inner")
        if name in self.__dict__["_modules"]:
            return super().__getattr__(name)
        if not hasattr(inner, name):
            raise KeyError(name)
        return getattr(inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(x))
        return out


@pytest.mark.ci
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_model_that_answers_for_attributes_is_recorded_as_a_whole(
    tmp_path: Path, *, is_compiled: bool
) -> None:
    inner: Any = nn.Linear(8, 2)
    compiled: Any = torch.compile(inner, backend="eager") if is_compiled else inner
    model, optimizer = with_sgd(PassesOn(compiled))
    hook = watching(tmp_path, model, optimizer)
    model(X).sum().backward()
    optimizer.step()
    assert {"head.weight:gradient", "head:output"} <= set(recorded(hook).tensors())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.LazyLinear(3)),
        lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_modules_that_take_no_hooks_are_wrong_arguments(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook, pytest.raises(ConfigError, match="module '0'"):
        hook.watch(make())


def test_nested_outputs_are_their_values(tmp_path: Path) -> None:
    hook, model = Hook(tmp_path, config=EVERY_STEP), Composed(jagged, layer=nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.watch(model, optimizer)
    due = model(X)
    due.sum().backward()
    optimizer.step()
    run = recorded(hook)
    row = run.tensor("layer:output").statistics().to_pylist()[0]
    assert (row["count"], row["max"]) == (32, due.max().item())


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_layer_with_a_parametrized_weight_is_a_layer(tmp_path: Path, name: str) -> None:
    """If it fails, the first bad output is its own, and not that of the layer after it."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        parametrized = getattr(nn.utils.parametrizations, name)(nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(8, 8), parametrized, nn.ReLU(), nn.Linear(8, 2))

    losses = []
    for is_recorded in (False, True):
        model, optimizer = with_sgd(build())
        hook = watching(tmp_path, model, optimizer) if is_recorded else None
        training = Training(model, optimizer)

        def spoil(step: int, _: Tensor, bias: Any = model[1].bias) -> None:
            if step == 1:
                with torch.no_grad():
                    bias[0] = torch.inf

        losses.append([f"{loss}" for loss in training.run(3, spoil)])
    assert losses[0] == losses[1]
    assert hook is not None
    run = recorded(hook)
    outputs = [f"{layer}:output" for layer in (0, 1, 2, 3)]
    assert {tensor for tensor in run.tensors() if tensor.endswith(":output")} == {*outputs, "model:output"}
    infinite = [run.tensor(output).statistics()["pos_inf"].to_pylist() for output in outputs[:3]]
    assert infinite == [[0, 0, 0], [0, 0, 32], [0, 0, 32]]


def test_updates_of_complex_weights_are_both_their_parts(tmp_path: Path) -> None:
    hook, model = Hook(tmp_path, config=EVERY_STEP), nn.Linear(8, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hook.watch(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(X.to(torch.complex64)).abs().pow(2).sum().backward()
        assert model.weight.grad is not None
        optimizer.step()
    run = recorded(hook)
    update, gradient = (
        run.tensor(f"weight:{kind}").statistics().to_pylist() for kind in ("update", "gradient")
    )
    assert update[0]["count"] == 2 * model.weight.numel()
    assert update[1]["abs_sum"] == pytest.approx(0.5 * gradient[1]["abs_sum"], rel=1e-4)


def test_trainings_in_two_threads_do_not_hear_each_other(tmp_path: Path) -> None:
    hooks = [Hook(tmp_path, config=EVERY_STEP, run=f"run-{seed}") for seed in range(2)]
    trainings = [Training(small_model(seed)) for seed in range(2)]
    together = threading.Barrier(2)

    def train(hook: Hook, training: Training) -> None:
        hook.watch(training.model, training.optimizer)

        def each(_step: int, _loss: Tensor) -> None:
            together.wait()

        training.run(20, each)

    threads = [threading.Thread(target=train, args=pair) for pair in zip(hooks, trainings, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook, training in zip(hooks, trainings, strict=True):
        run = recorded(hook)
        assert run.tensors("losses") == ["loss"]
        assert run.tensor("loss").statistics()["mean"].to_pylist() == training.losses
        assert run.steps() == list(range(20))


class SpiedParameter(nn.Parameter):
    """Remembers which threads read its gradient in Python."""

    readers: ClassVar[set[int]] = set()

    @property
    def grad(self) -> Tensor | None:
        self.readers.add(threading.get_ident())
        gradient: Tensor | None = vars(torch._C.TensorBase)["grad"].__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        vars(torch._C.TensorBase)["grad"].__set__(self, gradient)


def test_a_backward_pass_of_another_thread_reads_no_gradient(tmp_path: Path) -> None:
    # PyTorch replaces gradients without the interpreter's lock. To read one meanwhile crashed processes.
    hook, model = Hook(tmp_path, config=EVERY_STEP), nn.Linear(8, 2)
    model.weight, model.bias = SpiedParameter(model.weight), SpiedParameter(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.watch(model, optimizer)

    def train_another() -> None:
        SpiedParameter.readers.clear()
        nn.Linear(8, 2)(X).sum().backward()
        assert SpiedParameter.readers == set()

    for _ in range(3):
        optimizer.zero_grad()
        model(X).sum().backward()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(train_another).result()
        optimizer.step()
        assert SpiedParameter.readers == {threading.get_ident()}
        with ThreadPoolExecutor(1) as pool:
            pool.submit(train_another).result()
    assert recorded(hook).tensor("weight:gradient").statistics()["count"].to_pylist() == [16, 16, 16]


class Unreadable(nn.ReLU):
    """Has an attribute that cannot be read, and that recording does not need."""

    @property
    def inplace(self) -> bool:
        raise RuntimeError("not now")

    @inplace.setter
    def inplace(self, value: bool) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
        return input.relu()


@pytest.mark.parametrize(
    ("make", "lost"),
    [(Unreadable, set()), (lambda: NoHooks(4, 4), {"1:output"})],
    ids=["unreadable", "no hooks"],
)
def test_a_module_that_takes_no_hooks_costs_its_own_activations_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module], lost: set[str]
) -> None:
    model, optimizer = with_sgd(nn.Sequential(nn.Linear(8, 4), make(), nn.Linear(4, 2)))
    hook = watching(tmp_path, model, optimizer)
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.close()
    run = open_run(hook.run_url)
    assert set(run.tensors("activations")) == {"0:output", "1:output", "2:output"} - lost
    assert run.tensor("2.weight:gradient").steps() == [0, 1, 2]
    assert ("activations" in caplog.text) == bool(lost)


class Freed(nn.Module):
    """Gives a tensor whose memory is freed, as programs do that compute it anew when it is needed."""

    def forward(self, x: Tensor) -> Tensor:
        freed = x * 2
        freed.untyped_storage().resize_(0)
        return freed


def discards(module: Any, x: Tensor) -> Any:
    """Has outputs that are freed, and expanded outputs that use less memory than their shape."""
    module.freed(x)
    module.mask(torch.ones(1).expand(1 << 16, 1 << 16))
    return module.second(x)


def test_freed_and_expanded_outputs_do_not_end_the_program(tmp_path: Path) -> None:
    second = nn.Linear(8, 4)
    model = Composed(discards, second=second, freed=Freed(), mask=nn.Identity())
    optimizer = torch.optim.SGD([second.bias], 0.1)
    with watching(tmp_path, model, optimizer, run="r"):
        for _ in range(4):
            model(X).sum().backward()
            gradient = second.weight.grad
            assert gradient is not None
            gradient.untyped_storage().resize_(0)
            optimizer.step()
            optimizer.zero_grad()
            second.weight.grad = None
    assert open_run(tmp_path / "default" / "r").tensor("mask:output").rows.statistics.count[0] == 1 << 32


def test_freed_tensors_are_not_copied(tmp_path: Path) -> None:
    """A copy of a tensor whose storage was freed would end the process."""
    saved = Collection(Cadence(), tensors=Cadence())
    names = ("weights", "gradients", "activations", "inputs", "custom", "optimizer_state")
    config = CaptureConfig(collections=dict.fromkeys(names, saved), system=None, overhead_budget=None)
    unused, head = nn.Linear(8, 4), nn.Linear(8, 4)
    model = nn.Sequential(nn.Linear(8, 8), Freed(), unused)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.1)
    with watching(
        tmp_path, nn.ModuleDict({"model": model, "head": head}), optimizer, run="r", config=config
    ) as hook:
        for step in range(3):
            model[:2](X)
            head(X).sum().backward()
            hook.record(freed=Freed()(X), shrunk=shrunk(X), whole=X)
            if step == 1:
                hook.snapshot()
                assert head.weight.grad is not None
                unused.weight.data.untyped_storage().resize_(0)
            optimizer.step()
    run = open_run(tmp_path / "default" / "r")
    assert run.tensor("whole").saved_steps() == [0, 1, 2]
    assert run.tensor("freed").saved_steps() == run.tensor("shrunk").saved_steps() == []
    assert set(hook.health["faults"]) <= {
        "measuring"
    }  # the update of a weight without memory cannot be sampled


def shrunk(x: Tensor) -> Tensor:
    """A tensor whose storage is smaller than its elements."""
    y = x.clone()
    y.untyped_storage().resize_(4)
    return y


def test_zeros_without_memory_are_recorded(tmp_path: Path) -> None:
    """Forward-mode differentiation has such tensors."""
    with Hook(tmp_path, run="r", config=EVERY_STEP) as hook:
        hook.record(zero=torch._efficientzerotensor((2, 3)))
        hook.step()
    rows = open_run(tmp_path / "default" / "r").tensor("zero").rows.statistics
    assert (rows.count[0], rows.zero[0]) == (6, 6)


def test_overlapping_windows_are_measured_without_a_copy_of_each(tmp_path: Path) -> None:
    base = torch.arange(200_000, dtype=torch.float32)
    with Hook(tmp_path, run="r", config=EVERY_STEP) as hook:
        hook.record(
            torch=base.unfold(0, 500, 1), numpy=np.lib.stride_tricks.sliding_window_view(base.numpy(), 500)
        )
        hook.record(small=base[:100].unfold(0, 5, 1))
        hook.step()
    run = open_run(tmp_path / "default" / "r")
    for name in ("torch", "numpy"):
        rows = run.tensor(name).rows.statistics
        assert (rows.count[0], rows.max[0]) == (200_000, 199_999.0)
    assert run.tensor("small").rows.statistics.count[0] == 96 * 5


def test_a_reserved_name_does_not_lose_the_others(tmp_path: Path) -> None:
    config = CaptureConfig(collections={"custom": Collection(Cadence(), tensors=Cadence())}, system=None)
    with Hook(tmp_path, run="r", config=config) as hook:
        hook.record({"__metadata__": torch.ones(2), "other": torch.ones(3)})
        hook.step()
    run = open_run(tmp_path / "default" / "r")
    assert run.tensor("other").value(0).tolist() == [1.0, 1.0, 1.0]
    assert "a name that the format reserves" in str(hook.health["notes"])


def test_parameters_can_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of sharded parameters change their dtype and device so."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    with watching(tmp_path, model, optimizer, run="r"):
        for step in range(6):
            model(X.to(next(model.parameters()).dtype)).sum().backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            if step == 3:
                model.double()
                model.load_state_dict(model.state_dict())
    assert open_run(tmp_path / "default" / "r").steps() == list(range(6))


class Lazy(list[Tensor]):
    """Computes with the program's random numbers when it is iterated."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.rand(3)])


class Contains(nn.Module):
    """Has an output that contains itself, and one that computes when it is iterated."""

    def forward(self, x: Tensor) -> list[Any]:
        arguments: list[Any] = [x, Lazy([x])]
        arguments.append(arguments)
        return arguments


def test_containers_are_searched_without_their_own_methods(tmp_path: Path) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 4), "contains": Contains()})
    with watching(tmp_path, model, run="r") as hook:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        for _ in range(3):
            model["contains"](model["layer"](X))[0].sum().backward()
            hook.step()
        assert torch.equal(torch.get_rng_state(), before)
        assert not hook.health["faults"]
    names = open_run(tmp_path / "default" / "r").tensors("activations")
    assert [name for name in names if name.startswith("contains:")]


def switched_off(loss: Tensor) -> None:
    (loss / float("inf")).backward()


def by_an_infinite_tensor(loss: Tensor) -> None:
    (loss / torch.tensor(float("inf"))).backward()


def annealed_to_nothing(loss: Tensor) -> None:
    (loss * 1e-310).backward()


def complex_quotient(loss: Tensor) -> None:
    (torch.complex(loss, loss) / (2 + 1j)).backward(torch.tensor(1 + 0j))


def from_a_nameless_place(loss: Tensor) -> None:
    exec("loss.backward()", {"__name__": None, "loss": loss})


@pytest.mark.parametrize(
    "backward",
    [switched_off, by_an_infinite_tensor, annealed_to_nothing, complex_quotient, from_a_nameless_place],
)
def test_backward_does_what_it_does(tmp_path: Path, backward: Callable[[Tensor], None]) -> None:
    def trained(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = with_sgd(nn.Linear(8, 2))
        hook = watching(tmp_path, model, optimizer) if watched else None
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(X).square().mean())
            optimizer.step()
        if hook is not None:
            hook.close()
            assert open_run(hook.run_url).tensor("weight:gradient").steps() == [0, 1, 2]
        return [parameter.detach() for parameter in model.parameters()]

    for with_hook, without in zip(trained(watched=True), trained(watched=False), strict=True):
        assert torch.equal(with_hook, without)


class Comparable(torch.optim.SGD):
    """Can be compared, and so cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = None  # type: ignore[assignment]


def test_an_optimizer_that_cannot_be_hashed_is_recorded(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    optimizer = Comparable(model.parameters(), lr=0.1)
    other = Comparable([nn.Parameter(torch.zeros(1))], lr=0.1)
    hook = watching(tmp_path, model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        other.step()
    assert recorded(hook).tensor("weight:gradient").steps() == [0, 1, 2]


class ReadsItsClosure(torch.optim.SGD):
    """Asks the closure for what the program has put on it."""

    def step(self, closure: Any = None) -> Any:
        assert closure.__name__ == "closure"
        assert closure.scale == 2.0
        return super().step(closure)


def test_an_optimizer_gets_its_closure_with_name_and_attributes(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    optimizer = ReadsItsClosure(model.parameters(), lr=0.1)
    hook = watching(tmp_path, model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
        loss.backward()
        return loss

    closure.scale = 2.0  # type: ignore[attr-defined]
    for _ in range(3):
        optimizer.step(closure)
    assert recorded(hook).tensor("weight:gradient").steps() == [0, 1, 2]


class UnspeakableError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise IndexError("no text")


def test_an_exception_without_a_text_passes_and_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnspeakableError), Hook(tmp_path) as hook:  # noqa: PT012 - the hook's own end is tested
        hook.log(loss=1.0)
        raise UnspeakableError
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason) == ("failed", "UnspeakableError")


def test_a_sum_divided_by_the_batch_is_its_mean(tmp_path: Path) -> None:
    """Four micro-batches of four examples: the division is not one by the number of micro-batches."""
    model, losses = nn.Linear(8, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = watching(tmp_path, model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for micro in X[:, :].repeat(2, 1).view(4, 4, 8):
            loss = model(micro).square().sum() / 4
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
    means = recorded(hook).tensor("loss").statistics()["mean"].to_pylist()
    assert max(means) <= max(losses) * 1.0001


GIVEN = torch.randn(3, 8)


def through_file(model: nn.Module) -> nn.Module:
    """Saved whole, and loaded."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_file,
    "average": torch.optim.swa_utils.AveragedModel,
}
EXPORTS: dict[str, Callable[[nn.Module], Any]] = {
    "trace": lambda model: torch.jit.trace(model, GIVEN, check_trace=False),
    "export": lambda model: torch.export.export(model, (GIVEN,)).module(),
    "script": torch.jit.script,
    "script_of_a_copy": lambda model: torch.jit.script(copy.deepcopy(model)),
    "script_of_a_file": lambda model: torch.jit.script(through_file(model)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_has_the_programs_own_hooks(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)

    def doubled(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output * 2

    training.model.register_forward_hook(doubled)
    scripted = torch.jit.script(training.model)
    assert torch.equal(scripted(GIVEN), training.model(GIVEN))
    assert torch.equal(scripted(GIVEN), scripted.forward(GIVEN) * 2)
    assert len(scripted._forward_hooks) == 1
    training.run(3)
    assert recorded(hook).tensor("0:output").statistics()["step"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("name", [*COPIES, *EXPORTS])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_watched_model_is_copied_as_any_other(tmp_path: Path, name: str) -> None:
    hook, training = watched_training(tmp_path)
    training.run(2)
    training.model.eval()
    copied = {**COPIES, **EXPORTS}[name](training.model)
    assert torch.equal(copied(GIVEN), training.model(GIVEN))
    for _ in range(5):
        copied(GIVEN)
    run = recorded(hook)
    counts = run.tensor("0:output").statistics("eval")["count"].to_pylist()
    assert counts == [3 * 16]  # the model's own pass, and none of its copy's


@pytest.mark.ci
def test_a_saved_model_loads_where_watchstep_is_not(tmp_path: Path) -> None:
    hook = Hook(tmp_path / "runs", config=EVERY_STEP)
    model = small_model()
    hook.watch(model)
    torch.save(model, tmp_path / "model.pt")
    hook.close()
    program = (
        "import sys; sys.modules['watchstep'] = None\n"
        "import torch; print(torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 8)).shape)"
    )
    assert run_python("-c", program, tmp_path / "model.pt") == "torch.Size([1, 2])\n"


def test_an_average_of_the_model_trains_on_beside_it(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    average = torch.optim.swa_utils.AveragedModel(training.model)

    def follow(_step: int, _loss: torch.Tensor) -> None:
        average.update_parameters(training.model)
        average(GIVEN)

    losses = training.run(4, follow)
    plain = Training()
    assert losses == plain.run(4)
    assert (
        recorded(hook).tensor("0:output").statistics()["count"].to_pylist()
        == [len(batches(1)[0][0]) * 16] * 4
    )
