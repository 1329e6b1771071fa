"""A rule over full tensors that is attached while a run records: the recorder saves what it needs, and the rule fires live and in a backtest."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from torch import nn

from watchstep import CaptureConfig, Hook, open_run
from watchstep.capture.config import Bounds, Collection
from watchstep_rules import backtest_run, load
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

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
    while not open_run(hook.run_url).snapshots():
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
