"""Alerts of a run, and the rank at fault."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.programs import run_program
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, nan_from
from watchstep.format import layout
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.engine import Database
from watchstep_services.db.models import AlertRow, RuleStateRow
from watchstep_services.runs.registration import register

HOOK = "https://chat.example.com/hook"
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


def ill(step: int, name: str) -> float:
    """The loss is NaN at steps 41 to 44, and the second layer's gradient huge from 42 to 47."""
    if name == "loss" and 41 <= step <= 44:
        return math.nan
    return 1e6 if 42 <= step <= 47 and name.startswith("second") else 1.0


def driven_by(database: Database, store: Store, *rules: dict[str, Any]) -> tuple[Driven, int]:
    driven = Driven(make_service(database, store, [RuleConfig.model_validate(rule) for rule in rules]))
    return driven, driven.register()


def told(driven: Driven, run_id: int) -> list[tuple[str, str, int, str | None]]:
    """(rule, phase, step, inhibited by) of all events of alerts, in order of steps."""
    return sorted(
        (
            (data["rule_config"]["name"], data["phase"], data["step"], data["inhibited_by"])
            for data in (event["data"] for event in driven.events(run_id))
            if "rule_config" in data
        ),
        key=lambda line: (line[2], line[0]),
    )


def test_an_event_says_what_was_seen_and_what_to_try(sqlite: Database, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    driven, run_id = driven_by(
        sqlite,
        folder_store,
        {
            "rule": "non_finite_values",
            "severity": "critical",
            "labels": {"team": "vision"},
            "message": "{label.team}: {run} has {message} since {since_step}",
            "actions": [{"notify": "ml-oncall"}],
        },
    )
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    _started, event = driven.events(run_id)
    data = event["data"]
    assert data["message"] == "vision: run-1 has 1 NaN among 1 elements of loss, 0 tolerated since 5"
    assert (data["labels"], data["notify"], data["dry_run"]) == ({"team": "vision"}, ["ml-oncall"], False)
    explanation = data["explanation"]
    assert explanation["title"] == "non_finite_values (critical) firing: bad from step 5"
    assert explanation["seen"] == data["finding"]["message"]
    assert explanation["where"] == "loss: a loss; worker 0, mode train"
    assert explanation["usual_causes"]
    assert explanation["what_to_try"]
    with driven.service.database.read() as session:
        (row,) = session.query(AlertRow).all()
        assert row.details is not None
        assert row.details == {name: data[name] for name in row.details}


def test_a_dry_run_is_shown_and_does_nothing(sqlite: Database, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    rule = {"rule": "non_finite_values", "dry_run": True, "actions": ["stop", {"webhook": HOOK}]}
    driven, run_id = driven_by(sqlite, folder_store, rule)
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    _started, firing, would_have = (event["data"] for event in driven.events(run_id))
    assert (firing["dry_run"], would_have["because"]) == (True, "dry_run")
    assert driven.actions(run_id) == []


@pytest.mark.parametrize("ends", [[60], list(range(1, 61, 2)), [41, 43, 46, 60]], ids=str)
def test_what_follows_from_another_alert_is_told_when_that_is_over(
    sqlite: Database, folder_store: Store, ends: Sequence[int]
) -> None:
    recording = Recording(folder_store).begin()
    recording.write_all(ends, ill)
    driven, run_id = driven_by(
        sqlite,
        folder_store,
        {"rule": "non_finite_values", "inhibits": ["exploding_gradient"]},
        {"rule": "exploding_gradient", "actions": ["stop", {"webhook": HOOK}]},
    )
    for key in recording.written["w0"]:
        driven.judge(run_id, key)
    assert told(driven, run_id) == [
        ("non_finite_values", "firing", 41, None),
        ("exploding_gradient", "firing", 42, "non_finite_values"),
        ("exploding_gradient", "firing", 45, None),
        ("non_finite_values", "resolved", 45, None),
        ("exploding_gradient", "resolved", 48, None),
    ]
    assert [action.kind for action in driven.actions(run_id)] == ["webhook", "stop", "webhook"]


def test_what_is_over_before_it_is_told_is_never_told(sqlite: Database, folder_store: Store) -> None:
    def lasting(step: int, name: str) -> float:
        return math.nan if name == "loss" and step >= 41 else ill(step, name)

    recording = Recording(folder_store).begin()
    recording.write_all([42, 60], lasting)
    driven, run_id = driven_by(
        sqlite,
        folder_store,
        {"rule": "non_finite_values", "inhibits": ["exploding_gradient"]},
        {"rule": "exploding_gradient", "actions": ["stop", {"webhook": HOOK}]},
    )
    driven.judge(run_id, *recording.written["w0"])
    assert told(driven, run_id)[1:] == [
        ("exploding_gradient", "firing", 42, "non_finite_values"),
        ("exploding_gradient", "resolved", 48, "non_finite_values"),
    ]
    assert driven.actions(run_id) == []


def test_who_records_keeps_no_rule_of_the_owner_quiet(sqlite: Database, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    driven, _ = driven_by(sqlite, folder_store, {"rule": "exploding_gradient", "actions": ["stop"]})
    asked = RuleConfig(rule="non_finite_values", inhibits=("exploding_gradient",))
    run_id = driven.register(rules=[asked])
    driven.judge(run_id, recording.write(0, 0, 60, ill))
    assert ("exploding_gradient", "firing", 42, None) in told(driven, run_id)
    assert [action.kind for action in driven.actions(run_id)] == ["stop"]


@pytest.mark.parametrize("key", ["finding_streaks", "unknown"])
def test_a_memory_that_cannot_be_read_begins_anew(sqlite: Database, folder_store: Store, key: str) -> None:
    recording = Recording(folder_store).begin()
    driven, run_id = driven_by(sqlite, folder_store, {"rule": "non_finite_values"})
    driven.judge(run_id, recording.write(0, 0, 3))
    driven.change(RuleStateRow, state=json.dumps({"alert": {key: {"loss@0/train": 3}}}))
    driven = driven.restarted()  # the process that wrote it knows what it wrote
    driven.judge(run_id, recording.write(1, 4, 7, nan_from(5)))
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run."""
    folder = tmp_path_factory.mktemp("ranks")
    run_program(folder, PROGRAM, folder / "runs", ranks=2, WATCHSTEP_RUN="r", WATCHSTEP_ATTEMPT="a")
    return folder / "runs" / "test" / "r"


def segments_of(recorded: Path) -> dict[str, list[SegmentKey]]:
    """By writer, in their order."""
    found: dict[str, list[SegmentKey]] = {}
    for path in sorted((recorded / layout.SEGMENTS).rglob("*.arrow")):
        key = SegmentKey.parse(path.relative_to(recorded).as_posix())
        found.setdefault(key.writer.writer, []).append(key)
    return found


@pytest.mark.ci
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
