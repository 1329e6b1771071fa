"""What jobs are called in the lists of their backends."""

from __future__ import annotations

import re
import secrets


def job_name(run: str) -> str:
    """A name that tells the run, and that no other launch has."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40]
    return f"ws-{plain}-{secrets.token_hex(4)}" if plain else f"ws-{secrets.token_hex(4)}"
