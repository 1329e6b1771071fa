"""System rules, tested with trainings that leak memory and wait for data, each in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.runs import all_at_once
from watchstep import open_run
from watchstep.format.block import Block
from watchstep.format.system_figures import DATA_WAIT, INITIALIZATION_SECONDS, MEMORY_PRIVATE
from watchstep_rules.config.rule_config import RuleConfig

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PROGRAM = """
import contextlib, sys, time
sys.path[:0] = {path!r}
import torch, watchstep

torch.set_num_threads(1)
faulty = {faulty}
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
sampling = watchstep.SystemSampling(seconds=0.01, row_seconds=0.03, share=1.0)
prepared, kept, rows, began = torch.randn(256, 256), [], 0, time.perf_counter()
with watchstep.Hook({store!r}, run="r", config=watchstep.CaptureConfig(system=sampling)) as hook:
    hook.watch(model, optimizer)
    while rows < 90:
        for _ in range(50):
            x = torch.randn(256, 256 * 64)[:, :256] if faulty else prepared
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # By the clock, so that each row has its part of it, however slow the machine is.
            while faulty and len(kept) < min(60 * (time.perf_counter() - began), 1000):
                kept.append(b"x" * 2**20)
        with contextlib.suppress(watchstep.WatchstepError):  # nothing has been written yet
            rows = len(watchstep.open_run(hook.run_url).series({figure!r}, "mean"))
"""


@pytest.fixture(scope="module", params=[True, False], ids=["faulty", "healthy"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Block]:
    """Whether something is wrong with it, and what it recorded of the system."""
    store = tmp_path_factory.mktemp("store")
    program = PROGRAM.format(path=sys.path, faulty=request.param, store=str(store), figure=MEMORY_PRIVATE)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)
    block = open_run(Path(store) / "default" / "r").rows()
    return request.param, block.where(
        block.mask_of_tensors([info.role == "system" for info in block.catalogue])
    )


def found(block: Block, rule: str, **params: float) -> set[str]:
    outcome = all_at_once(RuleConfig(rule=rule, params=params), block)
    assert not outcome.memory.problem
    return {finding.tensor for finding in outcome.findings}


def test_a_leak_is_distinguished_from_a_training_that_keeps_to_its_memory(
    trained: tuple[bool, Block],
) -> None:
    faulty, block = trained
    due = {MEMORY_PRIVATE} if faulty else set()
    assert found(block, "memory_growth", window=16, warmup=50, growth=0.01, least_mib=16) == due


def test_a_training_that_waits_for_its_data_is_distinguished_from_one_that_has_them(
    trained: tuple[bool, Block],
) -> None:
    faulty, block = trained
    assert found(block, "data_loader", patience=10, data_wait=50) == ({DATA_WAIT} if faulty else set())


def test_how_long_it_took_to_begin_is_there_to_be_judged(trained: tuple[bool, Block]) -> None:
    _, block = trained
    assert found(block, "initialization_time") == set()
    assert found(block, "initialization_time", threshold=1e-6) == {INITIALIZATION_SECONDS}
