"""What a recording bundles: complete steps before their update, by the gate and on request, within its limits."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.sdk.training import Composed, skipping, watching, with_sgd
from watchstep import Bundles, CaptureConfig, Hook
from watchstep.format.bundle import PARAMETERS, Bundle, bundle_keys, open_bundle
from watchstep.format.control import ControlDocument, SnapshotRequest
from watchstep.pytorch.bundles import bundler
from watchstep.store.store import Store


def bundles(hook: Hook) -> list[Bundle]:
    """Close a hook. Returns the bundles of its run, in the order of their steps."""
    hook.close()
    store = Store.open(hook.run_url)
    return [open_bundle(store, key.path) for key in bundle_keys(store)]


def train(
    hook: Hook,
    batches: list[Any],
    *,
    use: Callable[[Any, Any], Any] | None = None,
    before: Callable[[int], None] = lambda _number: None,
) -> Any:
    """Train a small network with a normalization layer. Returns the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    hook.watch(model, optimizer)
    for number, batch in enumerate(batches):
        before(number)
        optimizer.zero_grad()
        value = use(model, batch) if use is not None else model(batch).pow(2).mean()
        value.backward()
        optimizer.step()
    return model


def of_second(hook: Hook) -> Callable[[int], None]:
    """Requests a bundle of the second step."""
    return lambda number: hook.bundle() if number == 1 else None


def inputs(number: int, bad: int | None = None) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(4, 4, generator=generator) for _ in range(number)]
    if bad is not None:
        drawn[bad][0, 0] = float("nan")
    return drawn


@pytest.mark.ci
def test_the_first_bad_step_is_bundled_as_it_was_before_its_update(tmp_path: Path) -> None:
    from watchstep.pytorch.bundles.values import torch_tensor

    states: list[dict[str, torch.Tensor]] = []
    current: list[Any] = []
    hook = Hook(tmp_path)

    def use(model: Any, batch: Any) -> Any:
        current[:] = [model]
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model(batch).pow(2).mean()

    train(hook, inputs(8, bad=5), use=use)
    (bundle,) = bundles(hook)  # later steps are of the same series
    assert (bundle.document.step, bundle.document.reason) == (5, "gate")
    assert bundle.document.lost == ()
    for name, tensor in states[5].items():
        kind = "buffers" if "running" in name or "tracked" in name else "parameters"
        assert torch.equal(torch_tensor(*bundle.read(f"{kind}/{name}")), tensor), name


@pytest.mark.ci
def test_at_most_two_series_are_bundled(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_nonfinite="skip")
    batches = inputs(12)
    for bad in (1, 2, 5, 9):
        batches[bad][0, 0] = float("inf")
    train(hook, batches)
    assert [bundle.document.step for bundle in bundles(hook)] == [1, 5]
    names = [thread.name for thread in threading.enumerate()]
    assert "watchstep-samples" not in names  # there are no samples to wait for


@pytest.mark.ci
def test_a_bad_loss_whose_update_the_program_leaves_out_is_bundled_too(tmp_path: Path) -> None:
    model, optimizer = with_sgd(torch.nn.Linear(4, 1))
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for number, batch in enumerate(inputs(3, bad=2)):
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            if number != 2:
                optimizer.step()
    (bundle,) = bundles(hook)
    assert (bundle.document.step, bundle.document.reason) == (2, "gate")
    assert bundle.document.lost == ()


def test_without_bundles_requests_have_no_effect(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=CaptureConfig(bundles=None))
    train(hook, inputs(4, bad=1), before=lambda _number: hook.bundle())
    assert bundles(hook) == []
    assert hook.health["faults"] == {}


@pytest.mark.ci
def test_events_and_requests_bundle_the_next_complete_step(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    session = hook._session
    document = ControlDocument(
        1, snapshots=(SnapshotRequest("event-7", 0), SnapshotRequest("requested-1", 0))
    )

    def before(number: int) -> None:
        if number == 3:
            from watchstep.capture.steps.session import apply_control

            apply_control(session, hook._stop_exchange, document, "a")

    train(hook, inputs(6), before=before)
    (bundle,) = bundles(hook)
    assert (bundle.document.step, bundle.document.reason) == (3, "alert")
    assert bundle.document.requests == ("event-7", "requested-1")
    assert not bundle.document.is_failing


@pytest.mark.ci
@pytest.mark.parametrize("source", ["loader", "program"])
def test_a_batch_that_the_program_changes_before_the_forward_pass_is_lost(
    tmp_path: Path, source: str
) -> None:
    hook = Hook(tmp_path)
    batches: list[Any] = inputs(3, bad=1)

    def use(model: Any, batch: Any) -> Any:
        if source == "program":
            batch = batch.clone()
            hook.batch(batch)
        batch.add_(1)
        return model(batch).pow(2).mean()

    loader: Any = torch.utils.data.DataLoader(torch.cat(batches), batch_size=4)  # type: ignore[arg-type]
    train(hook, loader if source == "loader" else batches, use=use)
    (bundle,) = bundles(hook)
    assert [lost.path for lost in bundle.document.lost] == ["micro_batches/0/batch"]
    assert "tensor" in bundle.document.micro_batches[0]["arguments"]["tuple"][0]  # as the pass read it


@pytest.mark.ci
def test_a_large_buffer_is_left_out_and_no_other(tmp_path: Path) -> None:
    model, optimizer = with_sgd(
        Composed(
            lambda module, x: module.linear(module.norm(x)),
            queue=torch.zeros(5 * 2**20),
            norm=torch.nn.BatchNorm1d(4),
            linear=torch.nn.Linear(4, 1),
        )
    )
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        model(inputs(1, bad=0)[0]).sum().backward()
        optimizer.step()
    (bundle,) = bundles(hook)
    assert [lost.path for lost in bundle.document.lost] == ["buffers/queue"]


def test_references_to_shared_memory_leave_file_descriptors_to_the_program() -> None:
    """Each tensor of a loader's worker has a descriptor of its own."""
    import resource

    from watchstep.pytorch.bundles.step_inputs import StepInputs

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        noted = StepInputs(torch.nn.Linear(1, 1), None, Bundles())
        for number in range(100):
            noted.batch_yielded(None, [torch.ones(1).share_memory_() for _ in range(3)], None, 0, number)
            noted.begin_pass(0)
            noted.backward(torch.ones(()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    referenced = [batch for batch in noted.micro_batches if not batch.is_dropped]
    assert len(referenced) == 1 + 1024 // 16 // 3  # and the current one
    assert referenced == noted.micro_batches[-len(referenced) :]


@pytest.mark.ci
def test_a_batch_that_the_program_changed_is_lost(tmp_path: Path) -> None:
    hook = Hook(tmp_path)

    def use(model: Any, batch: Any) -> Any:
        weights = batch.new_ones(4)
        hook.batch([batch, weights])
        value = model(batch).pow(2).mean()
        weights.add_(1)
        return value

    train(hook, inputs(3, bad=1), use=use)
    (bundle,) = bundles(hook)
    assert [lost.path for lost in bundle.document.lost] == ["micro_batches/0/batch/1"]
    assert "changed in place" in bundle.document.lost[0].reason


@pytest.mark.ci
def test_parameters_that_were_changed_since_the_pass_are_lost(tmp_path: Path) -> None:
    hook = Hook(tmp_path)

    def use(model: Any, batch: Any) -> Any:
        value = model(batch).pow(2).mean()
        with torch.no_grad():
            model[0].bias.mul_(1.0)
        return value

    model = train(hook, inputs(3), use=use, before=of_second(hook))
    (bundle,) = bundles(hook)
    assert [lost.path for lost in bundle.document.lost] == ["parameters/0.bias"]
    names = {name for name, _ in model.named_parameters()}
    assert set(bundle.names(PARAMETERS)) == names - {"0.bias"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("limit", "missing"),
    [(0, {"values", "buffers", "parameters", "gradients"}), (8000, {"gradients", "values", "parameters"})],
)
def test_a_bundle_keeps_to_its_limit_and_says_what_it_lacks(
    tmp_path: Path, limit: int, missing: set[str]
) -> None:
    hook = Hook(tmp_path, config=CaptureConfig(bundles=Bundles(limit_bytes=limit)))
    train(hook, inputs(3), before=of_second(hook))
    (bundle,) = bundles(hook)
    stored = sum(
        location.length
        for name, location in bundle.tensors.items()
        if name not in {"document", "gradient_digests"}
    )
    assert stored <= limit
    assert {lost.path for lost in bundle.document.lost} <= missing
    assert bundle.document.lost
    assert len(bundle.document.gradients) == 6  # their digests remain


@pytest.mark.ci
def test_what_is_redacted_is_not_in_the_object(tmp_path: Path) -> None:
    redact = ("micro_batches/*/batch", "program/argv", "parameters/0.*")
    hook = Hook(tmp_path, config=CaptureConfig(bundles=Bundles(redact=redact)))
    secret = inputs(3)
    secret[1][:] = 7654.5
    train(hook, secret, before=of_second(hook))
    (bundle,) = bundles(hook)
    (path,) = tmp_path.rglob("*-program.safetensors")
    assert secret[1].numpy().tobytes() not in path.read_bytes()
    assert np.float32(7654.5).tobytes() * 4 not in path.read_bytes()
    assert "argv" not in bundle.document.program
    assert sorted(bundle.names(PARAMETERS)) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    assert bundle.document.redacted == redact


@pytest.mark.ci
def test_batches_of_the_program_and_several_passes_for_a_loss(tmp_path: Path) -> None:
    hook = Hook(tmp_path)

    def use(model: Any, batch: Any) -> Any:
        hook.batch({"views": [batch, batch + 1], "name": "pair"})
        return (model(batch) - model(batch + 1)).pow(2).mean()

    train(hook, inputs(3), use=use, before=of_second(hook))
    (bundle,) = bundles(hook)
    (batch,) = bundle.document.micro_batches
    assert [key for key, _ in batch["batch"]["dict"]] == ["views", "name"]
    assert len(batch["losses"]["list"]) == 1


@pytest.mark.ci
def test_batches_of_several_data_loaders_are_a_tuple_and_those_of_evaluation_are_left_out(
    tmp_path: Path,
) -> None:
    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self, start: float) -> None:
            self._start = start

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), self._start + index)

    torch.manual_seed(0)
    model, optimizer = with_sgd(torch.nn.Sequential(torch.nn.Linear(4, 1)), 0.01)
    loaders = [torch.utils.data.DataLoader(Numbers(start), batch_size=4) for start in (0.0, 100.0, 1000.0)]
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for number, (first, second) in enumerate(zip(loaders[0], loaders[1], strict=True)):
            if number == 1:
                hook.bundle()
            optimizer.zero_grad()
            (model(first).mean() + model(second).mean()).backward()
            optimizer.step()
            model.eval()
            for batch in loaders[2]:
                model(batch)
            model.train()
    (bundle,) = bundles(hook)
    stored = bundle.document.micro_batches[0]["batch"]["tuple"]
    values = [bundle.read(entry["tensor"])[0][0, 0] for entry in stored]
    assert values == [4.0, 104.0]


def test_random_states_of_python_and_numpy_are_exact_or_lost(tmp_path: Path) -> None:
    from watchstep.pytorch.bundles import random_states

    copies = random_states.RandomStateCopies()
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002 - the generator that programs use
    first, second = copies.capture(), copies.capture()
    assert first.is_fresh
    assert not second.is_fresh
    assert random_states.as_value(second)["python"] is not None  # nothing was drawn since the copy
    drawn = (random.random(), float(np.random.rand()))  # noqa: NPY002 - as above
    assert random_states.as_value(second)["python"] is None
    assert random_states.restore(random_states.as_value(first)) == []
    assert (random.random(), float(np.random.rand())) == drawn  # noqa: NPY002 - as above


@pytest.mark.ci
def test_training_is_the_same_with_and_without_bundles(tmp_path: Path) -> None:
    weights = []
    for config in (CaptureConfig(bundles=None), CaptureConfig()):
        hook = Hook(tmp_path, config=config)
        model = train(hook, inputs(6), before=lambda number, hook=hook: hook.bundle() if number % 2 else None)  # type: ignore[misc]
        hook.close()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.ci
def test_no_code_of_the_program_runs_while_it_is_recorded_or_bundled(tmp_path: Path) -> None:
    class Lazy(Mapping[str, Any]):
        """Loads what it returns, and draws random numbers."""

        def __getitem__(self, name: str) -> Any:
            raise AssertionError(name)

        def __iter__(self) -> Any:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

    class Own(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError

        values = __iter__ = keys = items

    class Scheduler(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> Any:
            raise AssertionError

    hook = Hook(tmp_path)
    states: list[torch.Tensor] = []

    def use(model: Any, batch: Any) -> Any:
        if not states:
            holder.append(Scheduler(torch.optim.SGD(model.parameters(), lr=0.1), 2))
        hook.batch([Lazy(), Own(x=batch), batch])
        value = model(batch).pow(2).mean()
        states.append(torch.get_rng_state())
        return value

    holder: list[Any] = []
    train(hook, inputs(3, bad=1), use=use)
    (bundle,) = bundles(hook)
    assert hook.health["faults"] == {}
    assert ("micro_batches/0/batch/0", "values of this type are not stored") in [
        (lost.path, lost.reason) for lost in bundle.document.lost
    ]
    assert bundle.document.micro_batches[0]["batch"]["list"][1]["type"] == "Own"


@pytest.mark.ci
def test_taking_a_bundle_draws_no_random_numbers(tmp_path: Path) -> None:
    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"drawn": float(torch.rand(())) + random.random()}

    drawn = []
    for bundled in (False, True):
        hook = Hook(tmp_path)

        def before(number: int, hook: Hook = hook, bundled: bool = bundled) -> None:
            if number == 1:
                random.seed(1)
                torch.manual_seed(1)
                hook.include_in_bundles(drawing=Drawing())
                if bundled:
                    hook.bundle()

        train(hook, inputs(2), before=before)
        drawn.append((float(torch.rand(())), random.random()))
        hook.close()
    assert drawn[0] == drawn[1]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: [list(range(1_000_000))], 16_000_000),
        (lambda: [[{"word": "text"}] * 200_000], 1_000_000),
    ],
)
def test_large_python_containers_neither_stall_nor_lose_a_bundle(
    tmp_path: Path, make: Callable[[], Any], most: int
) -> None:
    hook = Hook(tmp_path)
    large = make()

    def use(model: Any, batch: Any) -> Any:
        hook.batch([batch, large])
        return model(batch).pow(2).mean()

    train(hook, inputs(2), use=use, before=lambda number: hook.bundle() if number else None)
    (bundle,) = bundles(hook)
    assert bundle.size < most
    assert len(bundle.document.lost) <= 1


def test_a_value_is_looked_at_within_a_limit() -> None:
    from watchstep.pytorch.bundles.step_inputs import Contents

    words = [[["word"] * 64] * 64] * 64
    contents = Contents.of(words)
    assert not contents.is_complete
    assert contents.bytes < 64 * 1024
    small = Contents.of([np.zeros(1000), {"text": "x" * 50}])
    assert small.is_complete
    assert small.bytes == 8050


@pytest.mark.ci
def test_references_of_earlier_micro_batches_keep_to_their_limit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = with_sgd(torch.nn.Linear(4, 1), 0.01)
    config = CaptureConfig(bundles=Bundles(reference_bytes=20_000))
    references = []
    with watching(tmp_path, model, optimizer, config=config) as hook:
        hook.bundle()
        for _ in range(6):
            array = np.zeros(1000)
            references.append(weakref.ref(array))
            hook.batch([torch.ones(2, 4), array])
            model(torch.ones(2, 4)).mean().backward()
            del array
        assert [reference() is not None for reference in references] == [False] * 3 + [True] * 3
        optimizer.step()
    (bundle,) = bundles(hook)
    assert ["batch" in batch for batch in bundle.document.micro_batches] == [False] * 3 + [True] * 3
    assert len(bundle.document.lost) == 3


@pytest.mark.ci
def test_values_and_buffers_without_dense_memory_are_lost_alone(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.layer = torch.nn.Linear(4, 1)
            self.register_buffer("edges", torch.eye(3).to_sparse(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layer(self.norm(x))
            return output

    model, optimizer = with_sgd(Model())
    with skipping(tmp_path, model, optimizer) as hook:
        for batch in inputs(3, bad=1):
            hook.batch([batch, torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    assert hook.health["faults"] == {}
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.isfinite().all()
    (bundle,) = bundles(hook)
    assert sorted(lost.path for lost in bundle.document.lost) == [
        "buffers/edges",
        "micro_batches/0/batch/1",
        "micro_batches/0/batch/2",
    ]


@pytest.mark.ci
def test_running_statistics_of_own_modules_are_those_before_the_pass(tmp_path: Path) -> None:
    from watchstep.pytorch.bundles.values import torch_tensor

    def forward(module: Any, x: torch.Tensor) -> Any:
        """Changes buffers by PyTorch's function, which does not count it as a change."""
        return module.layer(torch.nn.functional.batch_norm(x, module.mean, module.variance, training=True))

    model, optimizer = with_sgd(
        Composed(forward, layer=torch.nn.Linear(4, 1), mean=torch.zeros(4), variance=torch.ones(4))
    )
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for number, batch in enumerate(inputs(4)):
            if number == 3:
                hook.bundle()
                before = model.get_buffer("mean").clone()
            model(batch).mean().backward()
            optimizer.step()
    (bundle,) = bundles(hook)
    assert torch.equal(torch_tensor(*bundle.read("buffers/mean")), before)


@pytest.mark.parametrize("policy", ["record", "skip"])
def test_a_program_resizes_and_frees_its_tensors(tmp_path: Path, policy: str) -> None:
    """One that reuses a batch for longer sequences, and one that frees a table between its uses."""

    class Table(torch.nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(4))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            storage = self.table.untyped_storage()
            storage.resize_(16)
            factor = float(self.table.fill_(2.0)[0])
            storage.resize_(0)
            return batch * factor

    model, optimizer = with_sgd(torch.nn.Sequential(Table(), torch.nn.Linear(4, 1)))
    batch = torch.ones(2, 4)
    with Hook(tmp_path, on_nonfinite=policy) as hook:
        hook.watch(model, optimizer)
        for number in range(4):
            batch.resize_(2 + number, 4).fill_(float("nan") if number == 1 else 1.0)
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            if number != 1:
                optimizer.step()
    (bundle,) = bundles(hook)
    assert bundle.document.step == 1
    assert "buffers" in " ".join(lost.path for lost in bundle.document.lost)
    assert hook.health["faults"] == {}


def test_nothing_of_a_bundle_waits_for_a_garbage_collection(tmp_path: Path) -> None:
    """Its gradients would stay in memory until then."""
    hook = Hook(tmp_path)
    gc.collect()
    gc.disable()
    try:
        train(hook, inputs(4), before=of_second(hook))
        kinds = (bundler._BundleContent, bundler._Stored)
        assert not any(isinstance(each, kinds) for each in gc.get_objects())
    finally:
        gc.enable()
    assert len(bundles(hook)) == 1


def test_random_numbers_that_others_draw_meanwhile_stay_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a thread of the program does that reads the next batches."""
    digest, states = bundler._digest, []

    def drawing(data: memoryview) -> Any:
        torch.rand(1)
        states.append(torch.get_rng_state())
        return digest(data)

    monkeypatch.setattr(bundler, "_digest", drawing)
    hook = Hook(tmp_path)
    train(hook, inputs(2), before=of_second(hook))
    assert states
    assert torch.equal(torch.get_rng_state(), states[-1])
    hook.close()


def test_a_forked_child_writes_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Hook(tmp_path)
    process = os.getpid()
    with monkeypatch.context() as patched:

        def in_child(number: int) -> None:
            of_second(hook)(number)
            if number == 1:
                patched.setattr(os, "getpid", lambda: process + 1)

        train(hook, inputs(2), before=in_child)
    assert hook.health["counts"].get("bundles", 0) == 0
    hook.close()
