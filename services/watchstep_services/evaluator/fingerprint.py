"""What makes an alert the same one, on every attempt of its run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from watchstep_services.database.models import RuleConfigRow
from watchstep_services.database.models.alert_life import FINGERPRINT_LENGTH

RECORDER = "recorder"


def fingerprint(project: str, run: str, row: RuleConfigRow) -> str:
    """A stable name of the alert of a rule config on a run: by project, run, the config's name and its labels.

    What a recorder asks for is never the same as an alert of the owner's or an operator's: it could keep that one from being
    told of.
    """
    labels: dict[str, Any] = (row.data or {}).get("labels") or {}
    named = [project, run, row.name, row.origin == RECORDER, sorted(labels.items())]
    text = json.dumps(named, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()[:FINGERPRINT_LENGTH]
