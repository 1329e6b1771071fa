"""Recording a training that runs in the cells of a real notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import watchstep
from tests.notebook import Notebook, stream

PLAIN = """
import watchstep
hook = watchstep.Hook("runs", run="{run}")
for step in range({steps}):
    hook.log(loss=1 / (1 + step))
    hook.step()
"""
TRAINING = """
import gc, threading, weakref
import torch, watchstep
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
hook = watchstep.Hook("runs")
hook.watch(model, optimizer)
models.append(weakref.ref(model))
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
gc.collect()
print(len([reference for reference in models if reference() is not None]), threading.active_count(), hook.run_url)
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    with Notebook(tmp_path, {}).running() as running:
        yield running


def ended(run: str | Path) -> tuple[str, int, str]:
    """The state in the end document of its only worker."""
    (end,) = watchstep.open_run(run).ends()
    return end.state, end.last_step, end.reason


@pytest.mark.ci
def test_a_cell_that_is_run_again_ends_what_it_left_open_and_a_kernel_ends_the_rest(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "default"
    with Notebook(tmp_path, {}).running() as notebook:
        notebook.text(PLAIN.format(run="first", steps=3))
        (failed,) = notebook.run("1 / 0")
        _, interrupted = notebook.run(
            "print('waits', flush=True)\nimport time\ntime.sleep(600)",
            interrupt_at=lambda message: "waits" in str(message["content"].get("text")),
        )
        assert (failed.ename, interrupted.ename) == ("ZeroDivisionError", "KeyboardInterrupt")
        notebook.text("hook.log(loss=2.0)\nhook.step()")  # cells that make no hook go on with it
        outputs = notebook.run(PLAIN.format(run="second", steps=7))
        assert stream(outputs, "stderr") == ""
        assert ended(runs / "first") == ("completed", 3, "another cell began to record")
        two = 'both = [watchstep.Hook("runs", run=name) for name in ("third", "fourth")]\nfor each in both: each.step()'
        notebook.text(two)
    for name, words in (
        ("second", ("completed", 6, "another cell began to record")),
        ("third", ("completed", 0, "")),
    ):
        assert ended(runs / name) == words


@pytest.mark.ci
def test_a_training_that_is_run_again_retains_no_earlier_model(notebook: Notebook, tmp_path: Path) -> None:
    notebook.text("models = []")
    outputs = [notebook.text(TRAINING).split() for _ in range(3)]
    (tmp_path / "train.py").write_text(TRAINING)
    outputs += [notebook.text("%run -i train.py").split() for _ in range(2)]
    assert {exit_code for exit_code, _, _ in outputs} == {"1"}
    assert len({threads for _, threads, _ in outputs[1:]}) == 1
    for *_, url in outputs[:-1]:
        assert ended(url) == ("completed", 4, "another cell began to record")
        run = watchstep.open_run(url)
        assert run.tensor("0.weight").steps()[0] == 0
        assert run.losses().num_rows <= 5  # none of the next training
