"""Addresses of webhooks in rule configs: who has one may post there, as with Slack, so they are secrets.

Those who may operate see them where they read rule configs. Nobody sees them in events, the audit log and notifications: what
is said there goes to receivers, too.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlsplit

_KEYED = "webhook:"


def without_addresses(data: Any) -> Any:
    """JSON with rule configs in it, at any depth, and of each webhook's address the host alone."""
    if isinstance(data, list):
        return [without_addresses(each) for each in data]
    if not isinstance(data, dict):
        return data
    told = {name: without_addresses(value) for name, value in data.items()}
    if told.get("kind") == "webhook" and "url" in told:
        told["url"] = host_of(told["url"])
    if set(told) == {"webhook"}:  # as rule files write it
        told["webhook"] = host_of(told["webhook"])
    return told


def host_of(address: object) -> str:
    """``https://hooks.example/…`` for any address on that host."""
    try:
        parts = urlsplit(str(address))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "…"
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}{'' if port is None else f':{port}'}/…"


def action_key(event_id: str, address: str) -> str:
    """The key of the action that posts an event to a webhook; it tells addresses apart and holds none."""
    return f"{_KEYED}{event_id}:{hashlib.sha256(address.encode()).hexdigest()[:16]}"


def shown_key(key: str) -> str:
    """An action's key for people; those that earlier versions made held the address."""
    event_id, _, rest = key.removeprefix(_KEYED).partition(":")
    return action_key(event_id, rest) if key.startswith(_KEYED) and "://" in rest else key
