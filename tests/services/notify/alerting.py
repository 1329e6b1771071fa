"""A service with one alert of a recorded run, to look at its pictures and links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.recording import Value
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.db.encryption import new_key
from watchstep_services.db.models import AlertInstanceRow
from watchstep_services.notify.picture_links import PictureName

PUBLIC = "https://watch.example"
LAST = 80
EXPLODES = 60


def exploding(step: int, name: str) -> float:
    """A gradient of the second layer that is a million times larger from a step on."""
    size = 1e6 if step >= EXPLODES and name.startswith("second") else 1.0
    return size * (1.0 + 0.001 * (step % 7))


def reachable(driven: Driven, home: Path, **settings: Any) -> Driven:
    """The service with a public URL and a key."""
    key = SecretStr(new_key())
    given = {"public_url": PUBLIC, "secret_key": key, "home": home, **settings}
    return driven.with_settings(**given)


def with_receiver(driven: Driven, receiver: dict[str, Any], **route: Any) -> Driven:
    """The service with one receiver, which is notified at once."""
    written = {
        "receivers": [{"name": "ops", **receiver}],
        "route": {"receiver": "ops", "group_wait": 0, "group_interval": 0, **route},
    }
    return Driven(replace(driven.service, receiver_file=ReceiverFile.model_validate(written), owner_rules=()))


def fire(driven: Driven, value: Value = exploding, rule: str = "exploding_gradient") -> int:
    """Record a run whose alert fires; return its id."""
    driven = Driven(replace(driven.service, owner_rules=()))
    _, run_id = driven.record(
        value, last=LAST, rules=[RuleConfig.model_validate({"rule": rule, "name": "mine"})]
    )
    return run_id


def picture_name(driven: Driven) -> PictureName:
    """The picture of the one alert."""
    with driven.service.database.read() as session:
        (row,) = session.execute(select(AlertInstanceRow)).scalars()
    return PictureName("vision", "run-1", row.fingerprint)
