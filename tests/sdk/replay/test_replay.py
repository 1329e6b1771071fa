from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from watchstep import Hook
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.bundle import Bundle, bundle_keys, open_bundle
from watchstep.store.store import Store

# Bundles replay bit for bit, and name the planted fault.


PROGRAM = Path(__file__).with_name("programs.py")


def programs() -> Any:
    """The module with the programs, which imports PyTorch."""
    from tests.sdk.replay import programs as module

    return module


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Store, Hook]]:
    """The stores of recorded runs, by kind of program."""
    runs = {}
    for kind in ("cnn", "transformer", "accumulation"):
        with Hook(tmp_path_factory.mktemp("runs"), run=kind) as hook:
            programs().train(kind, hook)
        assert hook.health["faults"] == {}
        runs[kind] = (Store.open(hook.run_url), hook)
    return runs


def bundles_of(store: Store) -> dict[str, Bundle]:
    """The bundles of a run by their reason."""
    return {key.reason: open_bundle(store, key.path) for key in bundle_keys(store)}


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["cnn", "transformer", "accumulation"])
@pytest.mark.parametrize("reason", ["gate", "program"])
def test_a_step_is_computed_again_bit_for_bit(
    recorded: dict[str, tuple[Store, Hook]], kind: str, reason: str
) -> None:
    from watchstep.replay import replay

    bundle = bundles_of(recorded[kind][0])[reason]
    assert bundle.document.lost == ()
    result = replay(bundle, programs().step_of(kind))
    assert result.is_exact
    assert result.is_reproduced
    assert result.gradients > 0
    assert len(result.losses) == (4 if kind == "accumulation" else 1)
    assert result.was_nonfinite == result.is_nonfinite == bundle.document.is_failing == (reason == "gate")
    assert result.update_is_nonfinite == (reason == "gate")
    assert result.problems == ()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "cause", "name", "tensor"),
    [
        ("cnn", "tensor", "aten.convolution.default", "input[0]"),
        ("accumulation", "tensor", "aten.convolution.default", "input[0]"),
        ("transformer", "operation", "aten.addmm.default", ""),
    ],
)
def test_the_first_bad_operation_of_a_replay_is_the_planted_one(
    recorded: dict[str, tuple[Store, Hook]], kind: str, cause: str, name: str, tensor: str
) -> None:
    from watchstep.replay import render_replay, replay

    result = replay(bundles_of(recorded[kind][0])["gate"], programs().step_of(kind))
    assert result.diagnosis is not None
    first = result.diagnosis.first
    assert first is not None
    assert (first.cause, first.operation.name) == (cause, name)
    assert first.tensor is not None
    if cause == "tensor":
        assert first.tensor.name == tensor  # the batch was bad before the step
    text = render_replay(result)
    assert "reproduced: yes, bit for bit" in text
    assert f"programs.py:{first_line(kind)}" in text


def first_line(kind: str) -> int:
    """The line of the program that computes the bad values."""
    wanted = "scores = self.head" if kind == "transformer" else "value = functional.cross_entropy(model("
    lines = PROGRAM.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if wanted in line)


@pytest.mark.ci
def test_a_step_that_is_finite_in_higher_precision_fails_again_in_the_captured_one(
    recorded: dict[str, tuple[Store, Hook]],
) -> None:
    from watchstep.replay import render_replay, replay

    result = replay(
        bundles_of(recorded["transformer"][0])["gate"], programs().step_of("transformer"), precision="fp64"
    )
    assert not result.is_reproduced
    assert result.trace is None
    assert result.captured == "fails again"
    # Dropout draws random numbers, so the precision may not be the cause.
    assert "finite in fp64; it draws random numbers, which may be others" in render_replay(result)


def test_a_program_that_changed_since_is_not_reproduced(recorded: dict[str, tuple[Store, Hook]]) -> None:
    import torch

    from watchstep import ReplayStep
    from watchstep.replay import render_replay, replay

    step = programs().step_of("cnn")
    changed = ReplayStep(step.model, lambda model, batch: 2 * step.loss(model, batch))
    result = replay(bundles_of(recorded["cnn"][0])["program"], changed)
    assert not result.is_reproduced
    assert not result.is_exact
    assert result.largest is not None
    assert result.largest.relative == pytest.approx(1.0)
    assert "no: the losses differ" in render_replay(result)
    other = ReplayStep(torch.nn.Linear(2, 2), step.loss)
    with pytest.raises(ConfigError, match="the program's model has no parameter"):
        replay(bundles_of(recorded["cnn"][0])["program"], other)


def test_a_bundle_says_what_it_contains(recorded: dict[str, tuple[Store, Hook]]) -> None:
    store, hook = recorded["cnn"]
    document = bundles_of(store)["gate"].document
    assert document.run["run"] == "cnn"
    assert document.step == 14
    assert document.is_failing
    assert document.program["argv"]
    assert document.program["versions"]["torch"]
    assert document.loader is not None
    assert document.loader["batch"] == 14
    assert document.loader["sample_ids"] == {"list": [56, 57, 58, 59]}
    assert list(document.objects) == ["scheduler_0"]
    assert document.optimizers[0]["class"] == "AdamW"
    assert not bundles_of(store)["program"].document.is_failing
    assert hook.health["counts"]["bundles"] == 2


def command(*arguments: str | Path, kind: str = "cnn") -> subprocess.CompletedProcess[str]:
    """Run ``watchstep`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "watchstep.command", *map(str, arguments)],
        env={**os.environ, "KIND": kind},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.release
def test_the_command_replays_a_run_s_failing_step(
    recorded: dict[str, tuple[Store, Hook]], tmp_path: Path
) -> None:
    url = recorded["cnn"][1].run_url
    done = command("replay", url, "--program", PROGRAM, "--trace", tmp_path / "trace.zip")
    assert done.returncode == 0, done.stderr
    assert "reproduced: yes, bit for bit" in done.stdout
    assert "first operation that read a bad tensor: aten.convolution.default" in done.stdout
    traced = command("trace", tmp_path / "trace.zip", "--json")
    assert traced.returncode == 1
    assert json.loads(traced.stdout)["first"]["operation"]["name"] == "aten.convolution.default"


def test_the_command_lists_bundles(
    recorded: dict[str, tuple[Store, Hook]], capsys: pytest.CaptureFixture[str]
) -> None:
    from watchstep.wrapper.replay_command import bundles_main, find_bundle

    url = recorded["cnn"][1].run_url
    with pytest.raises(SystemExit) as left:
        bundles_main([url, "--json"])
    assert left.value.code == 0
    entries = json.loads(capsys.readouterr().out)["bundles"]
    assert [(entry["step"], entry["reason"]) for entry in entries] == [(4, "program"), (14, "gate")]
    assert find_bundle(url, "", None, None, None).document.step == 14
    assert find_bundle(url, "", 4, None, None).document.step == 4
    with pytest.raises(NotFoundError, match="no bundle of step 5 of worker 0"):
        find_bundle(url, "", 5, None, None)
    with pytest.raises(NotFoundError, match="no bundle of worker 3"):
        find_bundle(url, "", None, 3, None)


def test_a_program_that_exits_is_no_replay(
    recorded: dict[str, tuple[Store, Hook]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from watchstep.wrapper import replay_command

    program = tmp_path / "train.py"
    program.write_text("import sys\n\ndef replay():\n    sys.exit(0)\n")
    with pytest.raises(SystemExit) as left:
        replay_command.main([recorded["cnn"][1].run_url, "--program", str(program)])
    assert left.value.code == 2
    assert "the program ended the replay by sys.exit(0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("missing.py", "does not exist"),
        (f"{PROGRAM}:nothing", "has no function 'nothing'"),
        (f"{PROGRAM}:build", "missing 1 required positional argument"),
        ("no_such_module_anywhere:replay", "No module named"),
    ],
)
def test_a_program_without_a_step_is_refused(
    program: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from watchstep.replay import load_step

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises((ConfigError, TypeError), match=message):
        load_step(program)


@pytest.mark.release
def test_two_ranks_replay_bit_for_bit(tmp_path: Path) -> None:
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = {**os.environ, "KIND": "ddp", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(PROGRAM), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    replayed = subprocess.run(
        [
            *torchrun,
            "-m",
            "watchstep.command",
            "replay",
            str(tmp_path / "default" / "ddp"),
            "--program",
            str(PROGRAM),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert replayed.stdout.count("reproduced: yes, bit for bit") == 2, replayed.stderr
    assert "worker 0: the failing step" in replayed.stdout
    assert "worker 1: the failing step" in replayed.stdout


def test_a_program_whose_batch_was_not_named_is_told_what_the_bundle_has(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from watchstep.replay import ReplayStep, replay

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.mse_loss(model(inputs), labels)

    with Hook(tmp_path, run="r") as hook:
        hook.watch(model, optimizer)
        for _ in range(2):
            loss(model, (torch.ones(3, 4), torch.full((3, 2), torch.nan))).backward()
            optimizer.step()
    bundle = bundles_of(Store.open(hook.run_url))["gate"]
    with pytest.raises(
        ConfigError, match=r"ReplayStep.loss raised ValueError .* a float32 tensor of shape \[3, 4\]"
    ):
        replay(bundle, ReplayStep(nn.Linear(4, 2), loss))


TRAINING = """
import sys
import torch
import watchstep


def replay():
    return watchstep.ReplayStep(torch.nn.Linear(4, 2), lambda model, batch: model(batch).log().mean())


if __name__ == "__main__":
    model = torch.nn.Linear(4, 2)
    with watchstep.Hook(sys.argv[1], run="r") as hook:
        hook.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        hook.batch(torch.ones(3, 4))
        (model(torch.ones(3, 4)) - 10.0).log().mean().backward()
        optimizer.step()
"""


def test_a_replay_of_a_program_that_has_changed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from watchstep.wrapper import replay_command

    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(program), run_name="__main__")
    for text, is_changed in ((TRAINING, False), (f"{TRAINING}# changed\n", True)):
        program.write_text(text)
        with pytest.raises(SystemExit):
            replay_command.main([f"{tmp_path}/default/r", "--program", str(program)])
        told = capsys.readouterr().out
        assert ("note: train.py has changed since this step was recorded" in told) is is_changed


def test_a_bundle_without_a_forward_pass_names_both_causes(tmp_path: Path) -> None:
    import torch

    from watchstep.replay import replay

    model = torch.nn.Linear(4, 2)
    loss = (model(torch.ones(3, 4)) * torch.nan).sum()
    with Hook(tmp_path, run="r") as hook:
        hook.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        loss.backward()
        optimizer.step()
    bundle = bundles_of(Store.open(hook.run_url))["gate"]
    with pytest.raises(ConfigError, match="'watchstep run' records from the first update on"):
        replay(bundle, programs().step_of("cnn"))


# Steps under a gradient scaler


BAD = 3
KINDS = ["plain", "unscale", "fused", "fused_unscale", "two"]


def network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def loss_of(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1].log()).square().mean()


def optimizers_of(model: Any, kind: str) -> list[Any]:
    import torch

    fused = kind.startswith("fused")
    parts = [model[0], model[2]] if kind == "two" else [model]
    return [torch.optim.AdamW(part.parameters(), fused=fused) for part in parts]


def recorded_under_scaler(
    folder: Path, kind: str, *, requested: int = -1, bad: tuple[int, ...] = ()
) -> list[Bundle]:
    """Train eight steps under a gradient scaler. Returns the bundles in the order of their steps."""
    import torch

    model = network()
    optimizers = optimizers_of(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with Hook(folder) as hook:
        hook.watch(model, optimizers[0])
        for step in range(8):
            batch = [torch.randn(8, 4), torch.rand(8, 1) + 0.5]
            if step in bad:
                batch[1][3] = 0.0
            if step == requested:
                hook.bundle()
            hook.batch(batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if "unscale" in kind:
                scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert hook.health["faults"] == {}
    store = Store.open(hook.run_url)
    return [open_bundle(store, key.path) for key in bundle_keys(store)]


def replayed_under_scaler(bundle: Bundle, kind: str) -> tuple[Any, str]:
    from watchstep import ReplayStep
    from watchstep.replay import render_replay, replay

    optimizer = None if kind == "two" else lambda model: optimizers_of(model, kind)[0]
    result = replay(bundle, ReplayStep(network(), loss_of, optimizer=optimizer))
    return result, render_replay(result)


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_whose_update_a_scaler_skips_for_a_bad_loss_is_bundled(tmp_path: Path, kind: str) -> None:
    (bundle,) = recorded_under_scaler(tmp_path, kind, bad=(BAD,))
    assert (bundle.document.step, bundle.document.reason) == (BAD, "gate")
    result, text = replayed_under_scaler(bundle, kind)
    assert result.was_nonfinite
    assert result.is_reproduced
    assert "first bad operation: aten.log.default" in text


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_step_under_a_scaler_replays_bit_for_bit(tmp_path: Path, kind: str) -> None:
    (bundle,) = recorded_under_scaler(tmp_path, kind, requested=2)
    result, text = replayed_under_scaler(bundle, kind)
    assert result.is_exact, text
    assert result.update_is_nonfinite is (None if kind == "two" else False)


@pytest.mark.release
def test_each_of_two_series_under_a_scaler_is_bundled_at_its_first_step(tmp_path: Path) -> None:
    bundles = recorded_under_scaler(tmp_path, "plain", bad=(1, 2, 5, 7))
    assert [(bundle.document.step, bundle.document.reason) for bundle in bundles] == [
        (1, "gate"),
        (5, "gate"),
    ]


def test_overflows_that_the_scaler_causes_are_not_bundled(tmp_path: Path) -> None:
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(100 * loss_of(model, [torch.ones(2, 4), torch.ones(2, 1)])).backward()
            scaler.step(optimizer)
            scaler.update()
    assert list(bundle_keys(Store.open(hook.run_url))) == []
