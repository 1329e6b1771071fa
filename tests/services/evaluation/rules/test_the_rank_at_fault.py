"""Two ranks that train one model together: the alert names the one whose batch held NaN, whichever is judged first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.driving import Driven, make_service
from watchstep.format import layout
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.engine import Database
from watchstep_services.runs.registration import register

BAD = 20
PROGRAM = f"""
import os, sys
os.environ["LOCAL_WORLD_SIZE"] = "1"  # each writes for itself, as on machines of their own
import torch
import torch.distributed as dist
from torch import nn
from watchstep import Hook

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Hook(sys.argv[1], project="test", run="r") as hook:
    hook.watch(model, optimizer)
    for step in range({BAD + 3}):
        x = torch.randn(16, 8)
        if step == {BAD} and dist.get_rank() == 1:
            x[3, 5] = float("nan")
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
assert not hook.health["faults"], hook.health
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "train.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("torchrun"),
            *("--standalone", "--nproc-per-node", "2"),
            program,
            folder / "runs",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WATCHSTEP_RUN": "r", "WATCHSTEP_ATTEMPT": "a"},
    )
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "test" / "r"


def segments_of(recorded: Path) -> dict[str, list[SegmentKey]]:
    """By writer, in their order."""
    found: dict[str, list[SegmentKey]] = {}
    for path in sorted(recorded.rglob("*.arrow")):
        key = SegmentKey.parse(path.relative_to(recorded).as_posix())
        found.setdefault(key.writer.writer, []).append(key)
    return found


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_the_rank_at_fault_is_named(
    recorded: Path, tmp_path: Path, sqlite: Database, first: int, together: bool
) -> None:
    store = Store.open(tmp_path / "runs", create=True)
    place = tmp_path / "runs" / "test" / "r"
    shutil.copytree(recorded, place, ignore=shutil.ignore_patterns(layout.SEGMENTS.strip("/"), "end"))
    driven = Driven(make_service(sqlite, store, [RuleConfig(rule="non_finite_values", severity="critical")]))
    run_id = register(driven.service, "test", "r", (), "recorder")
    writers = segments_of(recorded)
    assert len(writers) == 2
    order = sorted(writers)[:: 1 if first == 0 else -1]
    for writer in order:
        for key in writers[writer]:
            (place / key.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(recorded / key.path, place / key.path)
        driven.announce(run_id, *writers[writer])
        if not together:
            driven.settle(run_id)
    driven.settle(run_id)

    kinds = [kind for kind in driven.event_types(run_id) if kind.startswith("alert.")]
    late = not together and first == 0
    assert kinds == ["alert.firing", "alert.revised"] if late else kinds == ["alert.firing"]
    last = [event["data"] for event in driven.events(run_id) if "rule_config" in event["data"]][-1]
    phase, step, finding = driven.alerts(run_id)["non_finite_values"]
    assert (phase, step, finding) == ("firing", BAD, last["finding"])
    assert (last["finding"]["step"], last["finding"]["worker"]) == (BAD, 1)
    assert last["finding"]["role"] == "output"
    assert last["finding"]["upstream"] == ["model:input"]
    assert "; the input contained 1 NaN among 128 elements of model:input" in last["message"]
    assert last["explanation"]["usual_causes"][0].startswith("The batch of this step was measured as bad")
