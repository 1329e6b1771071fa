"""Ranks that decide together: a finding of one stops all before the update; a failed recording of one stops none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sdk.programs import run_program

pytestmark = pytest.mark.ci

PROGRAM = """
import json, math, sys, time
import torch
import torch.distributed as dist
from torch import nn
from watchstep import CaptureConfig, Hook, StopTraining
from watchstep_rules import Guard

STEPS = 7
dist.init_process_group("gloo")
rank = dist.get_rank()

class Clock:
    fails = False
    def __call__(self):
        if self.fails:
            raise OSError("no clock")
        return time.perf_counter()

def train(case, guarded=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock, losses, stopped, untouched = Clock(), [], None, None
    if guarded:
        hook = Hook(sys.argv[1], run=case, config=CaptureConfig(clock=clock))
        Guard(agree=True).attach(hook)
        hook.watch(model, optimizer)
    try:
        for step in range(STEPS):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8) + rank).pow(2).mean()
            losses.append(loss.item())
            loss.backward()
            clock.fails = case == "fault" and rank == 1 and step > 2
            if case in ("found", "closed-other-finds") and rank == 0 and step == 4:
                net[0].weight.grad[0, 0] = math.nan
            optimizer.step()
            if step == 2 and (case == "all-closed" or case.startswith("closed") and rank == 1):
                hook.close()
    except StopTraining as stop:
        stopped, untouched = str(stop), all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    if rank == 0 and case in ("all-closed", "alone"):
        optimizer.step()
    if guarded:
        hook.close()
    faults = hook.health["faults"] if guarded else {}
    notes = hook.health["notes"] if guarded else {}
    return {"losses": losses, "stopped": stopped, "untouched": untouched, "faults": faults, "guard": notes.get("guard")}

found = {"plain": train("plain", guarded=False)}
for case in ("open", "found", "closed", "closed-other-finds", "fault", "all-closed", "alone"):
    found[case] = train(case)
print(json.dumps([rank, found]))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, by training; in the last of them the first rank makes an update more than the other."""
    folder = tmp_path_factory.mktemp("ranks")
    output = run_program(folder, PROGRAM, folder / "runs", ranks=2, WATCHSTEP_ATTEMPT="a")
    verdicts = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return [found for _, found in sorted(verdicts)]


@pytest.mark.release
@pytest.mark.parametrize("case", ["open", "closed", "fault", "all-closed", "alone"])
def test_a_training_is_the_same_whatever_becomes_of_one_recording(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for found in ranks:
        assert found[case]["losses"] == found["plain"]["losses"]
        assert found[case]["stopped"] is None


def test_a_fault_of_the_recorder_does_not_affect_the_agreement(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["fault"]["faults"] for found in ranks)
    assert first == {}
    assert set(second.values()) == {"OSError: no clock"}
    assert "stop barrier" not in second


@pytest.mark.parametrize("case", ["found", "closed-other-finds"])
def test_a_finding_of_one_rank_stops_both_including_a_closed_one(
    ranks: list[dict[str, Any]], case: str
) -> None:
    first, second = (found[case] for found in ranks)
    assert "nan_or_inf: bad from step 4" in first["stopped"]
    assert "the guard of another rank requested the stop" in second["stopped"]
    for found in (first, second):
        assert len(found["losses"]) == 5
        assert found["untouched"]
        assert found["faults"] == {}


def test_ranks_that_have_all_closed_vote_no_more(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:  # the first made an update alone
        assert found["open"]["faults"] == found["all-closed"]["faults"] == {}


def test_a_rank_whose_vote_fails_continues_and_reports_it(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["alone"] for found in ranks)
    assert list(first["faults"]) == ["stop barrier"]
    assert "do not stop training" in first["guard"]
    assert second["faults"] == {}
