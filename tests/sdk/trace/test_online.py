"""Chosen steps of a recorded training are traced and written to the run, without a change of the training."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import watchstep
from tests.services.cli.command_line import run_command
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import TraceKey
from watchstep.trace import TraceMode, alerts_of, diagnose, open_trace, saved_traces


def trained(
    folder: Path, trace: Any, steps: int = 6, *, bad: int = -1, context: Any = None
) -> tuple[watchstep.Hook, list[Tensor]]:
    """Train a small model, whose loss is infinite at one step."""
    torch.manual_seed(0)
    hook = watchstep.Hook(folder, run="r", trace=trace)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.watch(model, optimizer)
    losses = []
    for step in range(steps):
        if context is not None:
            context(step)
        optimizer.zero_grad()
        probabilities = torch.softmax(model(torch.randn(16, 4)) * (1e5 if step == bad else 1), -1)
        loss = -torch.log(probabilities).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    hook.close()
    return hook, losses


def counts(hook: watchstep.Hook) -> dict[str, int]:
    data: dict[str, int] = hook.health["counts"]
    assert hook.health["faults"] == {}
    return data


@pytest.mark.ci
def test_chosen_steps_are_on_the_store(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path, "0:1,4", bad=4)
    assert counts(hook)["traces"] == 2
    run = watchstep.open_run(hook.run_url)
    keys = saved_traces(run)
    assert [(key.worker, key.first, key.last) for key in keys] == [(0, 0, 1), (0, 4, 4)]
    healthy, bad = open_trace(run, 0), open_trace(run, keys[1])
    assert (healthy.steps, bad.steps) == ([0, 1], [4])
    assert {operation.module for operation in bad.operations} == {"", "0", "1", "2"}
    assert {operation.phase for operation in bad.operations} == {"forward", "backward", "optimizer"}
    assert alerts_of(healthy) == []
    first = diagnose(bad).first
    assert first is not None
    assert first.operation.name == "aten.log.default"
    site = bad.line_of(first.operation)
    assert site is not None
    assert bad.text_of(site) == "loss = -torch.log(probabilities).mean()"
    assert _get_current_dispatch_mode() is None


def test_the_training_is_the_same(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "plain", None)
    _, traced = trained(tmp_path / "traced", watchstep.TraceSteps("1:3", mode="full_tensor"))
    assert all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True))


@pytest.mark.ci
def test_updates_of_the_last_traced_step_are_checked(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path, watchstep.TraceSteps("2", mode=TraceMode.CONCISE_HEALTH), bad=2)
    trace = open_trace(watchstep.open_run(hook.run_url), 2)
    updated = [
        output
        for operation in trace.operations
        if operation.phase == "optimizer"
        for output in operation.outputs
        if output.nonfinite
    ]
    assert {output.name for output in updated} >= {"2.weight", "2.bias"}


def test_a_step_that_does_not_end_is_written_at_the_close(tmp_path: Path) -> None:
    hook = watchstep.Hook(tmp_path, trace="0:9")
    model = nn.Linear(2, 2)
    hook.watch(model)
    with contextlib.suppress(ValueError), hook:
        model(torch.ones(1, 2))
        raise ValueError("broken")
    trace = open_trace(watchstep.open_run(hook.run_url), 0)
    assert trace.raised == (0,)
    assert _get_current_dispatch_mode() is None


@pytest.mark.ci
def test_a_closed_hook_keeps_no_model(tmp_path: Path) -> None:
    hook = watchstep.Hook(tmp_path, trace="0:9", config=watchstep.CaptureConfig(bundles=None))
    model = nn.Linear(2, 2)
    reference = weakref.ref(model)
    hook.watch(model)
    model(torch.ones(1, 2))
    hook.close()
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.ci
def test_compiled_models_run_without_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with watchstep.Hook(tmp_path, trace="1") as hook:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    trace = open_trace(watchstep.open_run(hook.run_url), 1)
    assert {operation.phase for operation in trace.operations} == {"forward", "backward", "optimizer"}


def test_optimizers_in_hooks_of_gradients_are_left_out(tmp_path: Path) -> None:
    with watchstep.Hook(tmp_path, trace="1:2") as hook:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        hook.watch(model, optimizer)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
    assert counts(hook)["left_out_traces"] == 2


def test_steps_by_hand(tmp_path: Path) -> None:
    with watchstep.Hook(tmp_path, trace="1") as hook:
        model = nn.Linear(2, 2)
        hook.watch(model)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            hook.step()
    trace = open_trace(watchstep.open_run(hook.run_url), 1)
    assert trace.steps == [1]
    assert any(operation.name == "aten.addmm.default" for operation in trace.operations)


def test_one_hook_of_a_process_traces(tmp_path: Path) -> None:
    first = watchstep.Hook(tmp_path, run="a", trace="0:9")
    model = nn.Linear(2, 2)
    first.watch(model)
    from watchstep.trace.online import OnlineTracing

    session = first._session
    second = OnlineTracing(watchstep.TraceSteps("0"), model, 0, session.health, session.snapshot_writer)
    second.start(0)
    assert session.health.as_data()["counts"]["left_out_traces"] == 1
    second.close()
    first.close()
    assert len(saved_traces(watchstep.open_run(first.run_url))) == 1


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_program_is_left_alone(tmp_path: Path) -> None:
    mode: Any = Mode()  # type: ignore[no-untyped-call]

    def context(step: int) -> None:
        if step == 1:
            mode.__enter__()
        elif step == 3:
            current: Any = _get_current_dispatch_mode()
            assert current is mode
            mode.__exit__(None, None, None)

    hook, _ = trained(tmp_path, "1", context=context)
    trace = open_trace(watchstep.open_run(hook.run_url), 1)
    assert trace.steps == [1]
    assert "dispatch mode" in hook.health["notes"]["trace"]
    assert _get_current_dispatch_mode() is None


def test_memory_is_bounded(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path, watchstep.TraceSteps("0:5", mode="full_tensor", max_bytes=20_000))
    run = watchstep.open_run(hook.run_url)
    keys = saved_traces(run)
    assert keys
    traces = [open_trace(run, key) for key in keys]
    left_out = sum(trace.left_out for trace in traces) + counts(hook).get("left_out_traces", 0)
    assert left_out > 0


def test_a_trace_that_does_not_exist(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path, "1", steps=2)
    run = watchstep.open_run(hook.run_url)
    with pytest.raises(NotFoundError, match=r"trace of step 0.*\n.*1:1 of worker 0"):
        open_trace(run, 0)
    with pytest.raises(NotFoundError, match="of worker 3"):
        open_trace(run, 1, worker=3)


def test_foreign_objects_are_left_out(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path, None, steps=1)
    run = watchstep.open_run(hook.run_url)
    for path in ("traces/x", "traces/a/0/2-1.zip", "traces/a/00/1-2.zip"):
        run.store.put(path, b"")
    assert saved_traces(run) == []


def test_keys() -> None:
    key = TraceKey("a1", 3, 10, 12)
    assert key.path == "traces/a1/3/10-12.zip"
    assert TraceKey.parse(key.path) == key


@pytest.mark.parametrize(
    ("trace", "match"),
    [
        ("", "steps=''"),
        ("3:1", "1 is before 3"),
        ("a", "steps='a'"),
        ("1;2", "use steps and ranges"),
        (7, "steps=7"),
    ],
)
def test_steps_that_cannot_be(trace: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        watchstep.Hook(tmp_path, trace=trace)


@pytest.mark.parametrize(
    "values", [{"mode": "loud"}, {"operations": "("}, {"modules": "["}, {"max_bytes": 0}], ids=str
)
def test_settings_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        watchstep.TraceSteps("1", **values)


def test_an_unknown_dtype_is_reported_when_a_model_is_watched(tmp_path: Path) -> None:
    hook = watchstep.Hook(tmp_path, trace=watchstep.TraceSteps("1", dtypes=("float7",)))
    with hook, pytest.raises(ConfigError, match="float7"):
        hook.watch(nn.Linear(2, 2))


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_TRACE", "1")
    hook, _ = trained(tmp_path, None, steps=3)
    assert [key.first for key in saved_traces(watchstep.open_run(hook.run_url))] == [1]
    monkeypatch.setenv("WATCHSTEP_TRACE", "x")
    with pytest.raises(ConfigError, match="WATCHSTEP_TRACE='x'"):
        watchstep.Hook(tmp_path)


def test_the_command_reads_runs(tmp_path: Path) -> None:
    hook, _ = trained(tmp_path, "0,4", bad=4)
    folder = str(tmp_path / "default" / "r")
    listed = run_command("trace", "--list", folder)
    assert [line.split("steps ")[1] for line in listed.stdout.splitlines()] == ["0:0", "4:4"]
    found = run_command("trace", "--step", "4", hook.run_url)
    assert found.returncode == 1
    assert found.stdout.startswith("first bad operation: aten.log.default")
    assert run_command("trace", "--step", "0", folder).returncode == 0
    missing = run_command("trace", "--step", "2", folder)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 2)
    alerts = run_command("trace", "--alerts", "--step", "4", folder)
    assert "aten.log.default" in alerts.stdout.splitlines()[0]
    assert "-inf" in alerts.stdout.splitlines()[0]


def test_a_step_within_a_mode_of_the_program_is_left_out(tmp_path: Path) -> None:
    def steps(*, in_mode: bool) -> None:
        with Mode() if in_mode else contextlib.nullcontext():  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with watchstep.Hook(tmp_path, trace="1:3") as hook:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        steps(in_mode=True)
        assert _get_current_dispatch_mode() is None
        steps(in_mode=False)
        steps(in_mode=False)
        steps(in_mode=False)
    assert open_trace(watchstep.open_run(hook.run_url), 2).steps == [2, 3]
    assert counts(hook)["left_out_traces"] == 1
    assert "mode of the program" in hook.health["notes"]["trace"]


def test_the_default_device_is_no_obstacle(tmp_path: Path) -> None:
    with torch.device("cpu"):
        hook, _ = trained(tmp_path, "1", steps=3)
    assert counts(hook)["traces"] == 1


def test_steps_that_end_in_inference_mode(tmp_path: Path) -> None:
    with watchstep.Hook(tmp_path, trace="0:1,3:4") as hook:
        model = nn.Linear(2, 2)
        hook.watch(model)
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            with torch.inference_mode():
                hook.step()
            torch.zeros(1)
    assert open_trace(watchstep.open_run(hook.run_url), 0).steps == [0]
    assert counts(hook)["left_out_traces"] == 3


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="PyTorch before 2.6 restores nothing")
def test_compiled_steps_of_an_optimizer(tmp_path: Path) -> None:
    """PyTorch restores its dispatcher's state after a compiled function, so no mode may begin or end within it."""

    def losses(trace: str | None) -> tuple[watchstep.Hook, list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = torch.compile(optimizer.step, backend="eager")
        called = torch.compile(model, backend="eager")
        found = []
        with watchstep.Hook(tmp_path / str(trace), trace=trace) as hook:
            hook.watch(model, optimizer)
            for _ in range(5):
                optimizer.zero_grad()
                loss = called(torch.randn(3, 2)).square().mean()
                loss.backward()
                update()
                found.append(loss.item())
        return hook, found

    hook, traced = losses("0:1")
    assert open_trace(watchstep.open_run(hook.run_url), 0).steps == [0]
    assert counts(hook)["left_out_traces"] == 1
    assert traced == losses(None)[1]
    assert _get_current_dispatch_mode() is None


def test_divided_losses_of_traced_steps_are_recorded(tmp_path: Path) -> None:
    with watchstep.Hook(tmp_path, trace="1:2") as hook:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).square().mean() / 4).backward()
            optimizer.step()
    counts(hook)
    assert watchstep.open_run(hook.run_url).losses()["step"].to_pylist() == [0, 1, 2, 3]


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="PyTorch before 2.6 has no stances")
def test_a_close_in_another_thread(tmp_path: Path) -> None:
    hook = watchstep.Hook(tmp_path, trace="0:99")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.watch(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
    loss = model(torch.ones(1, 2)).sum()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    thread = threading.Thread(target=hook.close)
    thread.start()
    thread.join()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    loss.backward()
    optimizer.step()
    assert _get_current_dispatch_mode() is None
    assert open_trace(watchstep.open_run(hook.run_url), 0).steps == [0, 1, 2]
    assert counts(hook)["left_out_traces"] == 1
    other, _ = trained(tmp_path / "other", "1", steps=2)
    assert counts(other)["traces"] == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_inputs_are_not_kept_until_the_step_ends(tmp_path: Path, gradients: bool) -> None:
    model, batch = nn.Linear(2, 2), torch.ones(3, 2)
    with watchstep.Hook(tmp_path, trace="0", config=watchstep.CaptureConfig(bundles=None)) as hook:
        hook.watch(model)
        memory = StorageWeakRef(batch.untyped_storage())
        with torch.set_grad_enabled(gradients):
            model(batch)
        del batch
        assert memory.expired()
    trace = open_trace(watchstep.open_run(hook.run_url), 0)
    names = {read.name for operation in trace.operations for read in operation.inputs}
    assert {"input[0]", "weight"} <= names
