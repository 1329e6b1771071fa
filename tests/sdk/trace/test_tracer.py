"""What a tracer records: modules, phases, stacks, modes, filters and the ring, without any influence on training."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Hook
from watchstep.errors import ConfigError
from watchstep.trace import Trace, TraceConfig, TraceMode, Tracer, diagnose


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.reshape(-1, 5, 8), src_mask=self.mask)
        return y.mean(1)[:, :3]


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (Small, (12, 6)),
    "attending": (Attending, (12, 40)),
    "recomputing": (Recomputing, (12, 6)),
}


def train(model: nn.Module, shape: tuple[int, ...], steps: int, tracer: Tracer | None = None) -> list[float]:
    """Train with a fixed seed; returns the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(shape), torch.arange(shape[0]) % 3
        if tracer is None:
            losses.append(step(model, optimizer, x, y))
        else:
            with tracer.step():
                losses.append(step(model, optimizer, x, y))
    return losses


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One update."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def traced(name: str, config: TraceConfig | None = None, steps: int = 1) -> Trace:
    """The trace of a training."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    tracer = Tracer(model, config)
    train(model, shape, steps, tracer)
    return tracer.trace()


@pytest.mark.parametrize("mode", list(TraceMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_is_unchanged_and_healthy(name: str, mode: TraceMode) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    bare = make()
    expected = train(bare, shape, 3)
    torch.manual_seed(0)
    model = make()
    tracer = Tracer(model, TraceConfig(mode=mode))
    assert train(model, shape, 3, tracer) == expected
    for one, other in zip(bare.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    trace = tracer.trace()
    assert trace.notes == ()
    assert diagnose(trace).first is None
    assert diagnose(trace).contained == ()


def test_operations_have_phases_modules_and_lines() -> None:
    trace = traced("small")
    phases = {operation.phase for operation in trace.operations}
    assert phases == {"forward", "backward", "optimizer"}
    (linear,) = [
        each for each in trace.operations if each.name == "aten.addmm.default" and each.module == "head"
    ]
    lines, first = inspect.getsourcelines(Small)
    offset = next(place for place, line in enumerate(lines) if "self.head(self.inner(x))" in line)
    site = trace.line_of(linear)
    assert site is not None
    assert (site.function, site.line) == ("forward", first + offset)
    assert trace.text_of(site) == "out: Tensor = self.head(self.inner(x))"
    backward = [each for each in trace.operations if each.forward == linear.index]
    assert {each.node for each in backward} == {"AddmmBackward0"}
    assert {each.module for each in backward} == {"head"}
    assert {trace.line_of(each) for each in backward} == {site}
    (weight,) = [
        output.name
        for operation in trace.operations
        for output in operation.outputs
        if output.name == "head.weight:gradient"
    ]
    assert weight
    assert {tensor.name for tensor in linear.inputs} >= {"head.bias", "head.weight"}
    (output,) = linear.outputs
    assert (output.name, output.shape, output.dtype, output.device) == ("output", (12, 3), "float32", "cpu")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_within_an_optimizer_is_no_update(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    tracer = Tracer(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.log(model(torch.ones(2, 3)).square() * 0).mean()
        loss.backward()
        return loss

    with tracer.step():
        optimizer.step(closure)  # type: ignore[arg-type]
    trace = tracer.trace()
    first = diagnose(trace).first
    assert first is not None
    assert (first.operation.name, first.operation.phase) == ("aten.log.default", "forward")
    assert {each.phase for each in trace.operations} == {"forward", "backward", "optimizer"}


def test_a_tensor_is_followed_by_its_id() -> None:
    trace = traced("small")
    (first,) = [
        each for each in trace.operations if each.name == "aten.addmm.default" and each.module == "inner.0"
    ]
    (norm,) = [each for each in trace.operations if each.name.startswith("aten.native_batch_norm.")]
    assert norm.inputs[0].id == first.outputs[0].id
    assert [tensor.name for tensor in first.inputs][1] == "input[0]"


def test_checkpointed_forward_passes_are_recomputations() -> None:
    trace = traced("recomputing")
    repeated = [each for each in trace.operations if each.phase == "recomputation"]
    assert {each.module for each in repeated} >= {"body.0", "body.1"}
    assert "aten.tanh.default" in {each.name for each in repeated}


def test_a_nan_in_a_recomputed_module_is_attributed_to_its_first_run() -> None:
    torch.manual_seed(0)
    model = Recomputing()
    with torch.no_grad():
        model.body[0].bias.fill_(float("nan"))  # type: ignore[operator]
    tracer = Tracer(model)
    train(model, (12, 6), 1, tracer)
    first = diagnose(tracer.trace()).first
    assert first is not None
    assert first.tensor is not None
    assert (first.cause, first.tensor.name, first.operation.phase) == ("tensor", "body.0.bias", "forward")


def test_modes_record_what_they_say() -> None:
    model = nn.Linear(3, 2)
    x = torch.tensor([[0.0, -1.0, float("inf")], [2.0, float("nan"), float("-inf")]])

    def only_output(mode: TraceMode) -> tuple[object, ...]:
        tracer = Tracer(model, TraceConfig(mode=mode, operations=r"aten\.mul"))
        with tracer.step():
            _ = x * 2
        (operation,) = tracer.trace().operations
        (output,) = operation.outputs
        health = output.health
        return (
            output.nonfinite,
            health and (health.elements, health.nan, health.positive_infinite, health.negative_infinite),
            health and (health.negative, health.zero, health.positive),
            health and (health.minimum, health.maximum, health.mean),
            None if output.values is None else output.values.shape,
        )

    counts = (6, 1, 1, 1)
    assert only_output(TraceMode.NO_TENSOR) == (None, None, None, None, None)
    assert only_output(TraceMode.SHAPE) == (None, None, None, None, None)
    none = (None, None, None)
    assert only_output(TraceMode.CURT_HEALTH) == (True, counts, none, none, None)
    assert only_output(TraceMode.CONCISE_HEALTH) == (True, counts, none, none, None)
    assert only_output(TraceMode.FULL_HEALTH) == (True, counts, (1, 1, 1), none, None)
    assert only_output(TraceMode.STATISTICS) == (True, counts, (1, 1, 1), (-2.0, 4.0, 2 / 3), None)
    assert only_output(TraceMode.FULL_TENSOR) == (True, counts, (1, 1, 1), none, (2, 3))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
)
def test_every_dtype_is_checked(dtype: torch.dtype) -> None:
    for bad in (float("nan"), 1.0):
        tracer = Tracer()
        with tracer.step():
            _ = torch.tensor([1.0, bad]).to(dtype)
        outputs = [
            output
            for each in tracer.trace().operations
            for output in each.outputs
            if output.dtype == str(dtype)[6:]
        ]
        assert [output.nonfinite for output in outputs] == [bad != 1.0]


def test_uninitialized_memory_is_no_alarm() -> None:
    tracer = Tracer()
    with tracer.step():
        buffer = torch.empty(1000)
        buffer.copy_(torch.full((1000,), 2.0))
        for make in (
            torch.empty_like,
            lambda like: like.new_empty(5),
            lambda like: torch.empty_strided((2,), (1,)),
        ):
            make(buffer)
    assert [each.name for each in tracer.trace().operations if each.is_bad] == []


def test_infinity_that_is_removed_again_is_contained() -> None:
    tracer = Tracer()
    with tracer.step():
        x = torch.tensor([0.0, 1.0])
        y = torch.where(x > 0, x.log(), torch.zeros(2))
        y.sum()
    diagnosis = diagnose(tracer.trace())
    assert diagnosis.first is None
    assert [each.name for each in diagnosis.contained] == ["aten.log.default"]


def test_a_written_part_of_a_buffer_is_found() -> None:
    model = nn.Linear(2, 2)
    tracer = Tracer(model)
    with tracer.step():
        cache = torch.zeros(4, 2)
        cache[2:] = model(torch.ones(2, 2)).detach() * float("inf")
        loss = (model(cache) ** 2).sum()
        loss.backward()
    first = diagnose(tracer.trace()).first
    assert first is not None
    assert first.operation.name == "aten.mul.Tensor"


def test_an_operation_that_raises_is_named() -> None:
    model = nn.Linear(2, 2)
    tracer = Tracer(model)
    with pytest.raises(RuntimeError), tracer.step():
        model(torch.ones(2, 3))
    first = diagnose(tracer.trace()).first
    assert first is not None
    assert (first.cause, first.operation.name) == ("error", "aten.addmm.default")
    assert first.operation.error.startswith("RuntimeError: mat1 and mat2")


def test_chosen_steps_filters_and_ring() -> None:
    trace = traced("small", TraceConfig(steps=[1, 3, 4]), steps=6)
    assert trace.steps == [3, 4]
    assert trace.left_out > 0
    filtered = traced("small", TraceConfig(operations=r"aten\.(addmm|relu)", modules="inner"))
    assert {(each.name, each.module) for each in filtered.operations if each.phase == "forward"} == {
        ("aten.addmm.default", "inner.0"),
        ("aten.relu.default", "inner.2"),
    }
    halves = traced("small", TraceConfig(dtypes=("float16",)))
    assert halves.operations == []
    bounded = traced("small", TraceConfig(ring_bytes=10_000))
    assert 0 < len(bounded.operations) < 30
    assert bounded.left_out > 50


def test_a_compiled_model_runs_eagerly_while_it_is_traced() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    tracer = Tracer(model)
    with tracer.step():
        compiled(torch.ones(2, 4))
    assert "aten.relu.default" in {each.name for each in tracer.trace().operations}


@pytest.mark.parametrize(
    "arguments",
    [{"operations": "("}, {"modules": "["}, {"ring_steps": 0}, {"ring_bytes": 0}, {"dtypes": ("float7",)}],
)
def test_invalid_configurations(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        TraceConfig(**arguments)  # type: ignore[arg-type]


def test_the_operations_of_a_recorder_are_left_out(tmp_path: Path) -> None:
    def trained(hook: Hook | None, tracer: Tracer) -> list[float]:
        torch.manual_seed(0)
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters())
        if hook is not None:
            hook.watch(model, optimizer)
        losses = []
        for _ in range(4):
            x = torch.randn(12, 6)
            with tracer.step():
                losses.append(step(model, optimizer, x, torch.arange(12) % 3))
                if hook is not None:
                    hook.record(x=x)
        return losses

    alone, beside = Tracer(), Tracer()
    expected = trained(None, alone)
    with Hook(tmp_path, run="r", config=EVERY_STEP) as hook:
        assert trained(hook, beside) == expected
    run = recorded(hook)
    assert run.tensor("head.weight:gradient").steps() == [0, 1, 2, 3]
    traced_alone, traced_beside = alone.trace(), beside.trace()
    assert {each.name for each in traced_beside.operations} == {each.name for each in traced_alone.operations}
    # Gradients of losses are observed by hooks of autograd itself.
    assert len(traced_beside.operations) - len(traced_alone.operations) <= 4
    assert diagnose(traced_beside).contained == ()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own derivatives use it
def test_forward_mode_differentiation_has_tensors_without_memory() -> None:
    tracer = Tracer()
    with tracer.step():
        result = torch.func.jvp(lambda x: (x * 2 + torch.ones(3)).sum(), (torch.ones(3),), (torch.ones(3),))
    assert result[1].item() == 6.0


def test_higher_order_operators_run_unrecorded() -> None:
    tracer = Tracer()
    with tracer.step():
        result = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.zeros(2),))
    assert result.tolist() == [1.0, 1.0]


def test_lazy_models_and_models_that_are_saved_or_copied_meanwhile(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    tracer = Tracer(model)
    with tracer.step():
        model(torch.ones(2, 3))
        torch.save(model, tmp_path / "model.pt")
        copied = copy.deepcopy(model)
    torch.save(copied, tmp_path / "copy.pt")
    assert copied(torch.ones(2, 3)).shape == (2, 4)
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_cyclic_argument_and_a_caught_exception_are_no_fault() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, state: dict[str, object]) -> Tensor:
            try:
                torch.linalg.cholesky(-torch.eye(2))
            except RuntimeError:
                return x * 2
            raise AssertionError

    state: dict[str, object] = {}
    state["self"] = state
    model = Takes()
    tracer = Tracer(model)
    with tracer.step():
        model(torch.ones(2), state)
    trace = tracer.trace()
    assert trace.notes == ()
    assert any(each.error for each in trace.operations)
    assert diagnose(trace).first is None


def test_compiled_code_is_compiled_again_after_tracers_in_two_threads() -> None:
    both, tracers = threading.Barrier(2, timeout=60), (Tracer(), Tracer())

    def trace(tracer: Tracer, *, leaves_last: bool) -> None:
        with tracer.step():
            both.wait()
            if leaves_last:
                both.wait()
        if not leaves_last:
            both.wait()

    threads = [
        threading.Thread(target=trace, args=(tracer,), kwargs={"leaves_last": last})
        for tracer, last in zip(tracers, (False, True), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_padding_that_is_overwritten_does_not_clear_the_rest() -> None:
    model = nn.Linear(4, 6)
    tracer = Tracer(model)
    with tracer.step():
        logarithm = torch.log(torch.relu(model(torch.linspace(-1, 1, 32).view(8, 4))))
        logarithm = logarithm.clone()
        logarithm[:, 0] = 0
        logarithm *= 0.5
        logarithm.sum().backward()
    first = diagnose(tracer.trace()).first
    assert first is not None
    assert first.operation.name == "aten.log.default"


def test_a_temporary_at_the_address_of_a_replaced_weight_has_no_name() -> None:
    model = nn.Linear(64, 64)
    tracer = Tracer(model)
    with tracer.step():
        model(torch.ones(2, 64))
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.0
        for _ in range(50):
            torch.zeros(64, 64).masked_fill(torch.ones(64, 64) > 0, float("-inf"))
    diagnosis = diagnose(tracer.trace())
    assert diagnosis.first is None


def test_damage_of_a_parameter_with_the_name_of_an_argument_is_found() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_proj = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.input_proj(x)
            return out

    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    tracer = Tracer(model)
    with tracer.step():
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    first = diagnose(tracer.trace()).first
    assert first is not None
    assert (first.operation.phase, first.reaches.startswith("input_proj.")) == ("optimizer", True)


def test_gradients_that_are_repaired_and_statistics_of_hooks_are_contained() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def measure(parameter: Tensor) -> None:
        assert parameter.grad is not None
        torch.log(-parameter.grad.abs() - 1)

    model.weight.register_post_accumulate_grad_hook(measure)
    tracer = Tracer(model)
    with tracer.step():
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(0.0).nan_to_num_(0, 0, 0)
        optimizer.step()
    diagnosis = diagnose(tracer.trace())
    assert diagnosis.first is None
    assert [each.name for each in diagnosis.contained] == ["aten.log.default", *["aten.div_.Tensor"] * 2]


def test_inputs_that_are_changed_in_place_are_as_they_were_before() -> None:
    tracer = Tracer(nn.Linear(2, 2))
    with tracer.step():
        x = torch.ones(2, 4)
        x[1].div_(0.0)
        x[0].mul_(2.0)  # finite, in memory that is not
        x.mul_(0.0)
        x.fill_(1.0)
        x.div_(0.0)
    changes = [each for each in tracer.trace().operations if each.name.startswith(("aten.div_", "aten.mul_"))]
    before = [each.inputs[0] for each in changes]
    assert [each.nonfinite for each in before] == [False, False, True, False]
    assert [each.health.positive_infinite for each in before if each.health is not None] == [4]
    assert [each.outputs[0].nonfinite for each in changes] == [True, False, True, True]


def test_what_follows_a_backward_pass_is_of_gradients_if_it_reads_them() -> None:
    model = nn.Linear(4, 2)
    tracer = Tracer(model)
    with tracer.step():
        for _ in range(2):  # the second pass reads weights that were updated by hand, and is a forward pass
            model(torch.ones(3, 4)).abs().sum().backward()
            assert model.weight.grad is not None
            with torch.no_grad():
                model.weight.sub_(torch.neg(model.weight.grad))
    phases = {each.name: each.phase for each in tracer.trace().operations}
    assert (phases["aten.neg.default"], phases["aten.sub_.Tensor"]) == ("gradients", "gradients")
    assert {phases[name] for name in ("aten.addmm.default", "aten.abs.default")} == {"forward"}
