"""Programs that are attached: rules of single tensors, snapshots that are asked for, and capture files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml
from torch import nn

from tests.conftest import S3
from watchstep import CaptureConfig, Hook, open_run
from watchstep.capture.config import Bounds, Collection
from watchstep.errors import NotFoundError
from watchstep.format.snapshot import Snapshot
from watchstep_rules import backtest_run, load
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

pytestmark = pytest.mark.ci

WAIT = 120.0
SOON = Bounds(flush_seconds=0.2, control_seconds=0.05)
"""Five segments a second: a service that shares two busy cores with others evaluates more only with growing delay."""
RANK_RULE = '''
import numpy as np
from watchstep_rules import Needs, Params, Rule, State, TensorNeeds, finding_at


class LowRankParams(Params):
    least: float = 2.0


class LowRank(Rule[LowRankParams, State]):
    """Fires when the outputs of a layer have a low rank: all examples have almost the same output."""

    name = "low_rank"
    summary = "outputs have a low rank"
    needs = Needs(collections=("activations",), roles=("output",), tensors=TensorNeeds(every=20))
    merge = "per_worker"

    def evaluate(self, params, state, context, block, now):
        findings = []
        for row in range(len(block)):
            rank = float(np.linalg.matrix_rank(block.values[row]))
            if rank < params.least:
                message = f"{block.info(row).name} has rank {rank:g}, at least {params.least:g} is expected"
                findings.append(finding_at(self.name, block, row, value=rank, threshold=params.least, message=message))
        return state, findings
'''
RULE: dict[str, Any] = {
    "rule": "python",
    "name": "low_rank",
    "params": {"file": "low_rank.py", "class": "LowRank", "params": {"least": 2}},
    "tensors": {"include": r"2:output"},
}
RULES = "rules:\n  - {rule: non_finite_values, actions: [snapshot]}\n"
CAPTURE = """\
collections:
  encoder:
    cadence: null
    include: "encoder\\\\..*weight$"
    tensors: {every: 2}
  norms:
    cadence: null
    module_types: [LayerNorm]
    roles: [output]
    tensors: {every: null, steps: [1, 3], modes: [train]}
  moments:
    cadence: null
    roles: [momentum, second_moment]
    tensors: {every: 4}
  evaluated:
    cadence: null
    modules: [head]
    roles: [output]
    tensors: {every: 1, modes: [eval]}
"""
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 15)  # 15 rows: the ranks have shards of 8 and 7
        self.norm = nn.LayerNorm(15)
        self.head = nn.Linear(15, 3)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (2,))
for layer in (model.encoder, model.norm, model.head):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
seen = {}
model.norm.register_forward_hook(lambda *args: seen.__setitem__("norm", args[2].detach().clone()))
model.head.register_forward_hook(lambda *args: seen.__setitem__("head", args[2].detach().clone()))
generator = torch.Generator().manual_seed(rank)
for step in range(6):
    x = torch.randn(5, 8, generator=generator)
    weight = model.encoder.weight.full_tensor()
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    if rank == 0:
        np.save(out / f"encoder-{step}.npy", weight.detach().numpy())
    np.save(out / f"norm-{step}-{rank}.npy", seen["norm"].numpy())
    optimizer.step()
    moment = optimizer.state[model.encoder.weight]["exp_avg"].full_tensor()
    if rank == 0:
        np.save(out / f"moment-{step}.npy", moment.numpy())
    if step == 2:
        model.eval()
        with torch.no_grad():
            for batch in range(3):
                model(torch.randn(4, 8, generator=generator))
                if batch == 0:
                    np.save(out / f"eval-{step}-{rank}.npy", seen["head"].numpy())
        model.train()
dist.destroy_process_group()
"""


class Collapsing(nn.Sequential):
    """A model whose outputs become equal for all examples at some step."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def train(hook: Hook, collapsed: threading.Event, ended: threading.Event) -> None:
    """Train until an event is set; the outputs collapse when another is set."""
    torch.manual_seed(0)
    model = Collapsing()
    last = list(model.parameters())[2]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook.watch(model, optimizer)
    while not ended.wait(0.02):  # fifty steps a second leave the processor to the service
        if collapsed.is_set():
            with torch.no_grad():
                last.zero_()
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


def test_a_rule_attached_later_makes_the_recorder_save_tensors_and_fires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "low_rank.py").write_text(RANK_RULE)
    settings = load_settings(
        home=tmp_path / "home", store=str(tmp_path / "runs"), sweep_seconds=0.2, listing_seconds=0.2
    )
    quick = CaptureConfig(bounds=SOON)
    with EmbeddedService(settings) as service:
        monkeypatch.setenv("WATCHSTEP_SERVICE", service.url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)
        collapsed, ended = threading.Event(), threading.Event()
        with Hook(tmp_path / "runs", run="r", config=quick) as hook, ThreadPoolExecutor(1) as thread:
            attached = thread.submit(attach, service, tmp_path, hook, collapsed)
            attached.add_done_callback(lambda _: ended.set())
            train(hook, collapsed, ended)
            alert = attached.result()
        assert hook.health["faults"] == {}
    assert (alert["finding"]["tensor"], alert["finding"]["value"]) == ("2:output", 1.0)
    run = open_run(hook.run_url)
    assert {key.collection for key in run.snapshots()} == {"activations"}
    # A backtest over the finished run reads the same tensors and fires at the same step.
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"rules": [RULE]}))
    (outcome,) = backtest_run(run, load(rules)).attempts[0].outcomes
    assert outcome.fired
    assert outcome.fired[0].step == alert["since_step"]
    assert outcome.fired[0].step % 20 == 0


def saves_tensors(hook: Hook) -> bool:
    """Return whether full tensors of a run are on its store. The service knows the run before its document is there."""
    try:
        return bool(open_run(hook.run_url).snapshots())
    except NotFoundError:
        return False


def attach(service: EmbeddedService, folder: Path, hook: Hook, collapsed: threading.Event) -> dict[str, Any]:
    """Attach the rule once the run is known to the service; return its alert, which fires after the outputs have collapsed."""
    url = f"{service.url}/v1/projects/{hook.project}/runs/{hook.run}"
    headers = {"Authorization": f"Bearer {service.operator_token}"}
    rule = {**RULE, "params": {**RULE["params"], "source": (folder / "low_rank.py").read_text()}}
    deadline = time.monotonic() + WAIT
    while not httpx.put(f"{url}/rules/low_rank", json=rule, headers=headers).is_success:
        assert time.monotonic() < deadline, "the run is not known to the service"
        time.sleep(0.05)
    deadline = time.monotonic() + WAIT
    while not saves_tensors(hook):
        assert time.monotonic() < deadline, f"no tensors are saved: {hook.health}"
        time.sleep(0.05)
    collapsed.set()
    deadline = time.monotonic() + WAIT
    while True:
        alerts = httpx.get(f"{url}/alerts", headers=headers).json()["alerts"]
        for alert in alerts:
            if alert["name"] == "low_rank" and alert["phase"] == "firing":
                return dict(alert)
        assert time.monotonic() < deadline, f"no alert fires: {alerts}"
        time.sleep(0.05)


def test_the_state_of_a_rule_says_what_the_recorder_cannot_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "low_rank.py").write_text(RANK_RULE)
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"rules": [RULE]}))
    settings = load_settings(
        home=tmp_path / "home", store=str(tmp_path / "runs"), rules_file=rules, sweep_seconds=0.2, listing_seconds=0.2
    )  # fmt: skip
    config = CaptureConfig(collections={"weights": Collection()}, bounds=SOON)
    with EmbeddedService(settings) as service:
        monkeypatch.setenv("WATCHSTEP_SERVICE", service.url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)
        headers = {"Authorization": f"Bearer {service.operator_token}"}
        model = Collapsing()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with Hook(tmp_path / "runs", run="r", config=config) as hook:
            hook.watch(model, optimizer)
            deadline, problem = time.monotonic() + WAIT, ""
            while not problem and time.monotonic() < deadline:
                optimizer.zero_grad()
                model(torch.randn(16, 4)).square().mean().backward()
                optimizer.step()
                answer = httpx.get(f"{service.url}/v1/projects/{hook.project}/runs/r/rules", headers=headers)
                if answer.is_success:
                    states = {state["name"]: state for state in answer.json()["rules"]}
                    assert states["low_rank"]["health"] == "no_data"
                    problem = states["low_rank"]["problem"]
                time.sleep(0.05)  # leaves the processor to the service
    assert problem == "activations not recorded"


def test_a_rule_that_fires_has_full_tensors_taken(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    settings = load_settings(
        home=tmp_path / "home", store=str(tmp_path / "runs"), rules_file=rules,
        sweep_seconds=0.05, listing_seconds=0.05,
    )  # fmt: skip
    quick = CaptureConfig(bounds=Bounds(flush_seconds=0.02, control_seconds=0.02))
    with EmbeddedService(settings), Hook(tmp_path / "runs", run="r", config=quick) as hook:
        taken = train_until_taken(hook)
    assert {"0.weight", "0.bias"} <= set(taken.tensors)


def train_until_taken(hook: Hook) -> Snapshot:
    """Train until full tensors that the service asked for are on the store; the loss logged at step 3 is NaN."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    hook.watch(model, optimizer)
    deadline, step = time.monotonic() + WAIT, 0
    while time.monotonic() < deadline:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        hook.log(loss=float("nan") if step == 3 else 1.0)
        optimizer.step()
        step += 1
        try:
            run = open_run(hook.run_url)
        except NotFoundError:
            continue  # nothing is written yet
        for key in run.snapshots():
            held = run.open_snapshot(key)
            if held.metadata["reason"] == "request":
                return held
    raise AssertionError(f"nothing was asked for in {step} steps: {hook.health}")


@pytest.mark.release
def test_collections_of_a_file_are_saved_on_s3_by_two_ranks_and_merged(s3: S3, tmp_path: Path) -> None:
    s3.make_bucket("runs")
    program, capture, out = tmp_path / "train.py", tmp_path / "capture.yaml", tmp_path / "out"
    program.write_text(PROGRAM)
    capture.write_text(CAPTURE)
    out.mkdir()
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [
            folder / "watchstep", "run", "--store", "s3://runs/some", "--run", "r", "--capture", capture, "--",
            folder / "torchrun", "--standalone", "--nproc-per-node", "2", program, out,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WATCHSTEP_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = open_run("s3://runs/some/default/r")
    assert {key.collection for key in run.snapshots()} == {"encoder", "norms", "moments", "evaluated"}

    encoder = run.tensor("encoder.weight")
    assert encoder.saved_steps() == [0, 2, 4]
    for step in (0, 2, 4):
        expected = np.load(out / f"encoder-{step}.npy")
        np.testing.assert_array_equal(encoder.value(step), expected)
        np.testing.assert_array_equal(encoder.saved(step)[6:10, ::2], expected[6:10, ::2])
        assert encoder.value(step, worker=1).shape == (7, 8)
    moment = run.tensor("encoder.weight:exp_avg")
    assert moment.saved_steps() == [0, 4]
    np.testing.assert_array_equal(moment.value(4), np.load(out / "moment-4.npy"))
    norm = run.tensor("norm:output")
    assert norm.saved_steps() == [1, 3]
    for step in (1, 3):
        for worker in (0, 1):
            np.testing.assert_array_equal(
                norm.value(step, worker=worker), np.load(out / f"norm-{step}-{worker}.npy")
            )
    head = run.tensor("head:output")
    assert head.saved_steps(mode="eval") == [2]
    np.testing.assert_array_equal(head.value(2, mode="eval", worker=1), np.load(out / "eval-2-1.npy"))
