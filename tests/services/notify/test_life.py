"""The whole life of alerts, held to a small model by a clock that the test moves."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import select

from tests.services.driving import Driven, make_service
from tests.services.notify.clock import Clock, made_once, open_with
from tests.services.notify.plain_life import (
    HOLD,
    NAMES,
    REPLACED,
    SOURCE,
    TARGET,
    TOLD,
    WAYS,
    Life,
    Mute,
)
from tests.services.recording import NAN, PROJECT, Recording
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.db.models import AlertInstanceRow, AuditEntry, RunRow, Silence, StopGrant
from watchstep_services.notify import silences
from watchstep_services.notify.flush import flush_due
from watchstep_services.notify.silences import acknowledge, withdraw
from watchstep_services.runs.registration import register
from watchstep_services.runs.rule_configs import put_one
from watchstep_services.runs.stops import allow, revoke

EXAMPLES = int(os.environ.get("WATCHSTEP_LIFE_EXAMPLES", "20"))
"""How many lives are lived; `make test-life` lives many more."""

_HOOK = "https://chat.example.com/hook"
RECEIVERS = ReceiverFile.model_validate(
    {
        "receivers": [
            {"name": "ops", "kind": "webhook", "url": _HOOK},
            {"name": "pager", "kind": "webhook", "url": _HOOK},
            {
                "name": "alertmanager",
                "kind": "alertmanager",
                "url": "https://alertmanager.example.com",
                "resend_seconds": WAYS["alertmanager"].repeat,
            },
        ],
        "route": {
            "routes": [
                {
                    "receiver": name,
                    "continue": True,
                    "group_wait": way.wait,
                    "group_interval": way.interval,
                    "repeat_interval": way.repeat,
                    "send_resolved": way.ends,
                }
                for name, way in WAYS.items()
            ]
        },
    }
)
SERIES = {"loss": "loss", "first": "first", "tried": "second", "follows": "second"}

STRETCHES = st.lists(
    st.tuples(st.frozensets(st.sampled_from(NAMES)), st.integers(1, 4)), min_size=1, max_size=3
)
"""Steps that arrive together: the names that are bad, and for how many steps."""


def config(name: str, keep: int) -> RuleConfig:
    return RuleConfig.model_validate(
        {
            # What is to be kept quiet must wait for seals, as this rule does.
            "rule": "all_zero" if name == TARGET else "non_finite_values",
            "name": name,
            "tensors": {"include": SERIES[name]},
            "for": {"steps": HOLD[name]},
            "keep_firing": {"steps": keep},
            "dry_run": name == "tried",
            "inhibits": [TARGET] if name == SOURCE else [],
            "actions": ["stop", {"notify": "ops"}] if name == "loss" else [{"notify": "ops"}],
        }
    )


def value_of(bad: frozenset[str], tensor: str) -> float:
    """One tensor is NaN for one rule, and zero for another."""
    names = {name for name in bad if tensor.startswith(SERIES[name])}
    if TARGET in names:
        return 0.0
    return NAN if names else 1.0


class Lives(RuleBasedStateMachine):
    """A service and the model, led through the same."""

    template: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.template.parent))
        self.clock = Clock()
        self.database = open_with(self.clock, self.template, self.folder / "service.sqlite")
        self.store = Store.open(self.folder / "store", create=True)
        service = replace(make_service(self.database, self.store, []), receiver_file=RECEIVERS)
        self.driven = Driven(service)
        self.life = Life(self.clock.now_ns)
        self.segments = 0
        self.last: SegmentKey | None = None

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self) -> None:
        asked = tuple(config(name, self.life.keep[name]) for name in NAMES)
        self.run_id = register(self.driven.service, PROJECT, "run-1", asked, "operator")
        self._attempt()

    def _attempt(self) -> None:
        self.recording = Recording(self.store, attempt=self.life.attempt)
        self.recording.begin(started_ns=1 + int(self.life.attempt[1:]))
        self.segments = 0

    @rule(stretches=STRETCHES)
    def judge(self, stretches: list[tuple[frozenset[str], int]]) -> None:
        rows = [bad - {"tried"} if TARGET in bad else bad for bad, steps in stretches for _ in range(steps)]
        first = self.life.step + 1

        def value(step: int, tensor: str) -> float:
            return value_of(rows[step - first], tensor)

        self.last = self.recording.write(self.segments, first, first + len(rows) - 1, value)
        self.segments += 1
        self.driven.judge(self.run_id, self.last)
        self.life.judge(rows)

    @rule(stretches=STRETCHES, seconds=st.sampled_from([10, 60, 100]))
    def go_on(self, stretches: list[tuple[frozenset[str], int]], seconds: int) -> None:
        """What mostly happens: steps come, and a while later those who are to be told are."""
        self.judge(stretches)
        self.time_passes(seconds)
        self.sweep(1)

    @precondition(lambda self: self.last is not None)
    @rule()
    def judge_again(self) -> None:
        """An announcement that comes twice, and evaluations with nothing new."""
        assert self.last is not None
        self.driven.judge(self.run_id, self.last)
        self.driven.settle(self.run_id)

    @rule(seconds=st.sampled_from([1, 10, 59, 60, 600, 3600]))
    def time_passes(self, seconds: int) -> None:
        self.clock.move(seconds)
        self.life.now_ns = self.clock.now_ns

    @rule(times=st.integers(1, 2))
    def sweep(self, times: int) -> None:
        for _ in range(times):
            flush_due(self.driven.service)
        self.life.sweep()
        if times == 2:
            self.life.sweep()

    @rule()
    def restart_the_service(self) -> None:
        self.driven = self.driven.restarted()

    @precondition(lambda self: self.segments > 0)
    @rule(back=st.integers(0, 8))
    def restart_the_training(self, back: int) -> None:
        self.life.restarts()
        self.life.step = max(-1, self.life.step - back)
        self._attempt()

    @rule(name=st.sampled_from(tuple(REPLACED)))
    def replace_a_rule_config(self, name: str) -> None:
        asked = config(name, self.life.replaced(name))
        with self.database.write() as session:
            put_one(session, session.get_one(RunRow, self.run_id), asked)
        self.driven.settle(self.run_id)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([5, 90, 900]), suppresses_stop=st.booleans())
    def silence(self, name: str, seconds: int, suppresses_stop: bool) -> None:
        now = self.clock.now_ns
        asked = silences.SilenceRequest(
            silences.read_matchers([f"name={name}"]),
            "somebody",
            "why",
            now,
            now + seconds * 10**9,
            suppresses_stop,
        )
        with self.database.write() as session:
            silences.create(session, PROJECT, asked, now)
        self.life.silences.append(Mute(name, asked.ends_ns, suppresses_stop))

    @rule(name=st.sampled_from(TOLD))
    def expire_silences(self, name: str) -> None:
        with self.database.write() as session:
            for row in session.execute(select(Silence).order_by(Silence.id)).scalars():
                if row.matchers[0]["value"] == name:
                    silences.expire(session, row, "somebody")
        self.life.expires(name)

    @precondition(lambda self: any(self.life.known[name].firing for name in TOLD))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([one for one in TOLD if self.life.known[one].firing]))
        with self.database.write() as session:
            row = session.execute(select(AlertInstanceRow).filter_by(name=name)).scalar_one()
            acknowledge(session, "http://service.test", row, "somebody", "on it")
        self.life.known[name].acknowledged = True

    @precondition(lambda self: any(self.life.known[name].acknowledged for name in TOLD))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([one for one in TOLD if self.life.known[one].acknowledged]))
        with self.database.write() as session:
            withdraw(session, session.execute(select(AlertInstanceRow).filter_by(name=name)).scalar_one())
        self.life.withdraws(name)

    @rule()
    def allow_or_revoke(self) -> None:
        with self.database.write() as session:
            if self.life.allowed:
                row = session.execute(select(StopGrant).filter_by(revoked_ns=None)).scalar_one()
                revoke(session, row, "somebody", "why")
            else:
                allow(session, PROJECT, config("loss", self.life.keep["loss"]), "somebody", "why")
        self.life.allowed = not self.life.allowed

    @invariant()
    def alerts_are_the_models(self) -> None:
        with self.database.read() as session:
            rows = session.execute(select(AlertInstanceRow)).scalars()
            held = {
                row.name: (
                    row.phase == "firing",
                    bool(row.inhibited_by),
                    row.episode,
                    bool(row.acknowledged_by),
                )
                for row in rows
            }
        assert held == {
            name: (alert.firing, alert.hidden, alert.times, alert.acknowledged)
            for name, alert in self.life.known.items()
            if alert.times
        }

    @invariant()
    def notifications_are_the_models(self) -> None:
        if not hasattr(self, "run_id"):
            return
        actions = self.driven.actions(self.run_id, "notify")
        for name, group in self.life.groups.items():
            told = [
                action.payload["notification"] for action in actions if action.payload["receiver"] == name
            ]
            assert [_said(one) for one in told] == group.notifications, name
        assert len({action.payload["notification"]["id"] for action in actions}) == len(actions)
        assert len({action.key for action in actions}) == len(actions)

    @invariant()
    def stops_are_the_models(self) -> None:
        with self.database.read() as session:
            rows = session.execute(select(AuditEntry).order_by(AuditEntry.id)).scalars()
            stops = [
                (row.attempt, row.data.get("because", row.kind)) for row in rows if row.who == "rule loss"
            ]
        assert stops == self.life.stops


def _said(notification: dict[str, Any]) -> tuple[Any, ...]:
    alerts = [
        (alert["name"], alert["phase"], bool(alert["acknowledged_by"])) for alert in notification["alerts"]
    ]
    return notification["status"], tuple(sorted(alerts)), notification["repeat"], notification["at_ns"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory.mktemp("life") / "template.sqlite")


@pytest.mark.release
def test_alerts_live_as_the_model_says(template: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Lives.template = template
    run_state_machine_as_test(
        Lives, settings=settings(settings.default, max_examples=EXAMPLES, stateful_step_count=30)
    )
