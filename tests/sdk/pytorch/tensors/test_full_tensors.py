"""Full tensors of every kind are saved as the program computed them, bit for bit, and stock safetensors reads every object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.sdk.training import Composed, small_model, with_sgd
from watchstep import Cadence, CaptureConfig, Collection, Hook, Run, TensorLimits, open_run
from watchstep.format.snapshot import infos_of

SAVED = Collection(None, tensors=Cadence())
ALL = (
    "weights",
    "biases",
    "gradients",
    "activations",
    "inputs",
    "outputs",
    "labels",
    "losses",
    "metrics",
    "optimizer_state",
    "buffers",
    "custom",
)
Objects = dict[tuple[int, str, str], dict[str, Tensor]]


def hook_saving(folder: Path, collections: Mapping[str, Collection] | None = None, **options: Any) -> Hook:
    chosen = dict.fromkeys(ALL, SAVED) if collections is None else dict(collections)
    return Hook(folder, run="r", config=CaptureConfig(collections=chosen, system=None, **options))


def finished(hook: Hook) -> Run:
    hook.close()
    assert hook.health["faults"] == {}
    return open_run(hook.run_url)


def objects_of(run: Run, folder: Path) -> Objects:
    """All saved tensors by step, mode and collection, as stock safetensors reads them."""
    found: Objects = {}
    for key in run.snapshots():
        with safetensors.safe_open(folder / "default" / "r" / key.path, "pt") as file:
            found[key.step, key.mode, key.collection] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("weight")}


def gradients_of(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    return {f"{name}:gradient": p.grad / scale for name, p in model.named_parameters() if p.grad is not None}


def outputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the last outputs of modules without children, made by hooks of the test's own."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            outputs[f"{name}:output"] = output.detach().clone()

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(keep(name))
    return outputs


def test_every_kind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outputs = outputs_of(model)
    hook = hook_saving(tmp_path)
    hook.watch(model, optimizer)
    expected: Objects = {}
    for step in range(3):
        x, y = torch.randn(5, 8), torch.randint(0, 4, (5,))
        output = model(x)
        loss = functional.cross_entropy(output, y)
        hook.record(labels=y, mine=x.double() ** 2)
        hook.log(accuracy=0.25 * step)
        optimizer.zero_grad()
        loss.backward()
        named = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = gradients_of(model)
        buffers = {name: b.clone() for name, b in model.named_buffers() if name.startswith("1.running")}
        optimizer.step()
        state = {
            f"{name}:{key}": value.clone()
            for name, p in model.named_parameters()
            for key, value in optimizer.state[p].items()
            if value.dim()
        }
        for collection, tensors in {
            "weights": {name: p for name, p in named.items() if name.endswith("weight")},
            "biases": {name: p for name, p in named.items() if name.endswith("bias")},
            "gradients": gradients,
            "activations": dict(outputs),
            "inputs": {"model:input": x},
            "outputs": {"model:output": output},
            "labels": {"labels": y},
            "losses": {"loss": loss.double()},
            "metrics": {"accuracy": torch.tensor(0.25 * step, dtype=torch.float64)},
            "optimizer_state": state,
            "buffers": buffers,
            "custom": {"mine": x.double() ** 2},
        }.items():
            expected[step, "train", collection] = tensors
    run = finished(hook)
    found = objects_of(run, tmp_path)
    metrics = [key for key in found if key[2] == "metrics"]
    for key in metrics:
        found[key] = {
            "accuracy": found[key]["accuracy"]
        }  # others are the recorder's own, such as the learning rate
    assert found.keys() == expected.keys()
    for key in expected:
        assert_equal(found[key], expected[key])
    assert run.rows().catalogue is not None
    assert run.tensors("weights") == [] or all(
        not run.tensor(name).steps() for name in run.tensors("weights")
    )


def test_descriptions_are_saved(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    hook = hook_saving(tmp_path)
    hook.watch(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    run = finished(hook)
    infos = {name: info for key in run.snapshots() for name, info in infos_of(run.open_snapshot(key)).items()}
    gradient = infos["3.weight:gradient"]
    assert (gradient.role, gradient.collections, gradient.module, gradient.module_type) == (
        "gradient",
        ("gradients",),
        "3",
        "Linear",
    )
    assert (gradient.shape, gradient.dtype) == ((2, 16), "float32")
    assert infos["2:output"].order > infos["1:output"].order


def test_collections_by_regex_module_type_and_role(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = outputs_of(model)
    hook = hook_saving(
        tmp_path,
        {
            "regex": Collection(None, include="[01]:output", tensors=Cadence()),
            "types": Collection(None, module_types=("Linear",), roles=("output",), tensors=Cadence()),
            "state": Collection(None, roles=("momentum",), modules=("3",), tensors=Cadence()),
            "ins": Collection(None, roles=("input",), modules=("2",), tensors=Cadence()),
        },
    )
    hook.watch(model, optimizer)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    optimizer.step()
    run = finished(hook)
    found = objects_of(run, tmp_path)
    momenta = {
        f"3.{name}:momentum_buffer": optimizer.state[p]["momentum_buffer"]
        for name, p in model[3].named_parameters()
    }
    # A tensor in two collections is in the first one of them.
    assert_equal(found[0, "train", "regex"], {name: outputs[name] for name in ("0:output", "1:output")})
    assert_equal(found[0, "train", "types"], {"3:output": outputs["3:output"]})
    assert_equal(found[0, "train", "state"], momenta)
    assert_equal(found[0, "train", "ins"], {"2:input": outputs["1:output"]})
    assert run.steps() == [0]  # of the rows about saved objects
    assert [info for info in run.rows().catalogue if info.role != "saved"] == []


def odd_tensors() -> dict[str, Tensor]:
    """Dtypes and layouts."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    values = {
        str(dtype).removeprefix("torch."): base.to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    }
    values |= {
        str(dtype).removeprefix("torch."): (10 * base.abs()).to(dtype)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    }
    values |= {
        str(dtype).removeprefix("torch."): (10 * base.abs()).to(torch.int64).to(dtype)
        for dtype in (torch.uint16, torch.uint32, torch.uint64)
    }
    values |= {
        "float8_e4m3fn": base.to(torch.float8_e4m3fn),
        "float8_e5m2": base.to(torch.float8_e5m2),
        "number": torch.tensor(1.5, dtype=torch.float16),
        "empty": torch.zeros(0, 3),
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "expanded": base[:1].expand(5, 4),
        "repeated_number": torch.ones(()).expand(3, 3),
        "channels_last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "conjugate": torch.complex(base, base + 1).conj(),
        "negative": torch.complex(base, base + 1).conj().imag,
        "nonfinite": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "with_graph": (torch.ones(3, requires_grad=True) * 2),
        "narrow_of_fp8": base.to(torch.float8_e4m3fn)[:, 1:3],
    }
    return values


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    values = odd_tensors()
    hook = hook_saving(tmp_path, {"custom": SAVED})
    hook.record(values)
    hook.step()
    (found,) = objects_of(finished(hook), tmp_path).values()
    assert_equal(found, values)
    assert hook.health["counts"].get("dropped_tensors", 0) == 0


@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
def test_gradients_are_saved_without_the_scale_of_a_scaler(tmp_path: Path, scale: float) -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)  # sees scaled gradients
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
    hook = hook_saving(tmp_path, {"gradients": SAVED, "activations": SAVED})
    hook.watch(model, optimizer)
    outputs = outputs_of(model)
    expected = {}
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, 8)).float().pow(2).mean()
        scaler.scale(loss).backward()
        factor = scaler.get_scale()
        if step == 1:
            next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        else:
            expected[step] = gradients_of(model, factor)
        last = dict(outputs)
        scaler.step(optimizer)
        scaler.update()
    found = objects_of(finished(hook), tmp_path)
    gradients = {step: tensors for (step, _, name), tensors in found.items() if name == "gradients"}
    assert gradients.keys() == {0, 2}  # the update of step 1 was skipped
    for step, tensors in expected.items():
        assert_equal(gradients[step], tensors)
    assert last["0:output"].dtype == torch.bfloat16
    assert_equal(found[2, "train", "activations"], last)


def test_accumulated_gradients_and_the_activations_of_the_first_micro_batch(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    outputs = outputs_of(model)
    hook = hook_saving(tmp_path, dict.fromkeys(("gradients", "activations", "losses"), SAVED))
    hook.watch(model, optimizer)
    expected = {}
    for step in range(2):
        optimizer.zero_grad()
        for part in range(3):
            loss = model(torch.full((2, 8), step + part / 3)).pow(2).mean()
            if part == 0:
                first, first_loss = dict(outputs), loss.detach().double()
            loss.backward()
        expected[step] = first, gradients_of(model), {"loss": first_loss}
        optimizer.step()
    found = objects_of(finished(hook), tmp_path)
    for step, (activations, gradients, losses) in expected.items():
        assert_equal(found[step, "train", "activations"], activations)
        assert_equal(found[step, "train", "gradients"], gradients)
        assert_equal(found[step, "train", "losses"], losses)


def test_several_optimizers_and_updates_of_a_step_make_one_object(tmp_path: Path) -> None:
    model = small_model()
    critic = torch.optim.SGD(model[3].parameters(), lr=0.1)
    primary = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    hook = hook_saving(tmp_path, {"weights": SAVED, "gradients": SAVED})
    hook.watch(model, primary)
    expected = {}
    for step in range(2):
        weights = weights_of(model)
        for update in range(3):  # the critic's first update is saved
            model.zero_grad()
            model(torch.full((2, 8), 1.0 + update + step)).pow(2).sum().backward()
            if update == 0:
                of_critic = {name: g for name, g in gradients_of(model).items() if name.startswith("3.")}
            if update < 2:
                critic.step()
        expected[step] = weights, gradients_of(model) | of_critic
        primary.step()
    found = objects_of(finished(hook), tmp_path)
    assert len(found) == 4
    for step, (weights, gradients) in expected.items():
        assert_equal(found[step, "train", "weights"], weights)
        assert_equal(found[step, "train", "gradients"], gradients)


def test_a_closure_is_saved_as_at_its_first_call(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    hook = hook_saving(tmp_path, {"weights": SAVED, "gradients": SAVED})
    hook.watch(model, optimizer)
    calls: list[dict[str, Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 8)).pow(2).sum()
        loss.backward()
        calls.append(gradients_of(model))
        return loss

    weights = weights_of(model)
    optimizer.step(closure)
    found = objects_of(finished(hook), tmp_path)
    assert len(calls) > 1
    assert_equal(found[0, "train", "weights"], weights)
    assert_equal(found[0, "train", "gradients"], calls[0])


def test_of_an_evaluation_the_first_due_batch(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    outputs = outputs_of(model)
    evaluated = Collection(None, tensors=Cadence(2, modes=("eval",)))
    hook = hook_saving(tmp_path, {"activations": evaluated, "labels": evaluated, "losses": SAVED})
    hook.watch(model, optimizer)
    expected, number = {}, 0
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        model.eval()
        hook.mode = "eval"
        for _ in range(3):
            with torch.no_grad():
                model(torch.full((2, 8), float(number)))
            hook.record(labels=torch.tensor([number]))
            hook.log(val_loss=float(number))
            if number % 2 == 0 and step not in expected:
                expected[step] = dict(outputs), number
            number += 1
        hook.mode = "train"
        model.train()
    found = objects_of(finished(hook), tmp_path)
    assert {key for key in found if key[2] == "activations"} == {(s, "eval", "activations") for s in range(3)}
    for step, (activations, batch) in expected.items():
        assert_equal(found[step, "eval", "activations"], activations)
        assert_equal(found[step, "eval", "labels"], {"labels": torch.tensor([batch])})
        assert found[step, "eval", "losses"]["val_loss"].item() == 3 * step


def test_a_part_of_the_examples_and_channels(tmp_path: Path) -> None:
    model, optimizer = with_sgd(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(0)))
    outputs = outputs_of(model)
    limits = TensorLimits(rows=(1, 3), channels=(2, 100))
    part = Collection(None, tensors=Cadence(), tensor_limits=limits)
    hook = hook_saving(
        tmp_path, dict.fromkeys(("activations", "inputs", "labels", "weights", "custom"), part)
    )
    hook.watch(model, optimizer)
    x = torch.randn(4, 3, 6, 6)
    model(x).sum().backward()
    hook.record(labels=torch.arange(2), number=torch.tensor(1.0), few=torch.ones(1, 1))
    optimizer.step()
    run = finished(hook)
    found = objects_of(run, tmp_path)
    assert_equal(
        found[0, "train", "activations"],
        {"0:output": outputs["0:output"][1:3, 2:], "1:output": outputs["1:output"][1:3]},
    )
    assert_equal(found[0, "train", "inputs"], {"model:input": x[1:3, 2:]})
    assert_equal(found[0, "train", "labels"], {"labels": torch.tensor([1])})
    assert_equal(found[0, "train", "custom"], {"number": torch.tensor(1.0), "few": torch.zeros(0, 0)})
    assert found[0, "train", "weights"]["0.weight"].shape == (8, 3, 3, 3)  # whole
    (key,) = (key for key in run.snapshots() if key.collection == "activations")
    part_of = run.open_snapshot(key).parts["0:output"]
    assert (part_of.shape, part_of.start, part_of.is_shard) == ((4, 8, 4, 4), (1, 2, 0, 0), False)


class Refusing(Tensor):
    """A tensor of the program's own class, which cannot be copied."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_:
            raise RuntimeError("no copies")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_what_cannot_be_saved_is_counted_and_named(tmp_path: Path) -> None:
    model, optimizer = with_sgd(
        Composed(
            lambda module, x: module.layer(module.embedding(x)),
            embedding=nn.Embedding(4, 3, sparse=True),
            layer=nn.Linear(3, 2),
        )
    )
    hook = hook_saving(tmp_path, {"gradients": SAVED, "weights": SAVED, "custom": SAVED})
    hook.watch(model, optimizer)
    model(torch.tensor([0, 1])).sum().backward()
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    hook.record(
        sparse=torch.eye(3).to_sparse(),
        meta=torch.ones(2, device="meta"),
        wide=torch.ones(2, dtype=torch.complex128),
        refusing=torch.ones(3).as_subclass(Refusing),
        nested=nested,
        good=torch.ones(2),
    )
    optimizer.step()
    run = finished(hook)
    found = objects_of(run, tmp_path)
    assert set(found[0, "train", "gradients"]) == {"layer.weight:gradient", "layer.bias:gradient"}
    assert set(found[0, "train", "weights"]) == {"embedding.weight", "layer.weight"}
    custom = found[0, "train", "custom"]
    assert set(custom) == {"good", "nested"}
    assert custom["nested"].shape == (6, 3)  # all of its values
    assert hook.health["counts"]["dropped_tensors"] == 5
    notes = hook.health["notes"]
    assert "embedding.weight:gradient" in notes["tensors of gradients"]
    assert "not saved (torch.float32)" in notes["tensors of gradients"]
    assert "refusing could not be copied (RuntimeError)" in notes["tensors of custom"]
    for name in ("sparse", "meta", "wide"):
        assert name in notes["tensors of custom"]


def test_a_retried_update_saves_the_gradients_of_the_update_that_was_made(tmp_path: Path) -> None:
    model = small_model()

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                raise RuntimeError("out of memory")
            return super().step(closure)

    optimizer = Failing(model.parameters(), lr=0.1)
    hook = hook_saving(tmp_path, {"gradients": SAVED})
    hook.watch(model, optimizer)
    for attempt in range(2):
        model.zero_grad()
        model(torch.full((2, 8), 1.0 + attempt)).pow(2).sum().backward()
        gradients = gradients_of(model)
        try:
            optimizer.step()
        except RuntimeError:
            continue
    found = objects_of(finished(hook), tmp_path)
    assert_equal(found[0, "train", "gradients"], gradients)
