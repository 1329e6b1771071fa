"""Columns whose webhook addresses are sealed at rest: whoever has such an address may post there.

The database's engine has the key (`use_seal`); values are sealed when they are bound and opened when they are read, so that
nothing else of the service sees a sealed one. Values without a seal, of an earlier version or of a service without a key, are
read as they are. A value that cannot be opened is read as `UNREADABLE`, an address that leads nowhere: the rule that names it
still judges and stops, and its webhook fails visibly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import JSON, Dialect, Text
from sqlalchemy.types import TypeDecorator

from watchstep.errors import ConfigError

UNREADABLE = "https://sealed-with-a-missing-key.invalid/"
_PREFIX = "sealed:"
_PLACE = "webhook address"

_log = logging.getLogger(__name__)


class Sealer(Protocol):
    """Seals text for a place, and opens it."""

    def seal(self, place: str, secret: str) -> str:
        """Seal a secret."""

    def open(self, place: str, sealed: str) -> str:
        """Open what `seal` gave.

        Raises:
            ConfigError: it was sealed with another key.
        """


_sealers: WeakKeyDictionary[Dialect, Sealer] = WeakKeyDictionary()


def use_seal(dialect: Dialect, sealer: Sealer) -> None:
    """Seal addresses that are written by the engine of this dialect from now on."""
    _sealers[dialect] = sealer


def sealed(dialect: Dialect, data: Any) -> Any:
    """Data with its webhook addresses sealed; as it is where the engine has no key."""
    sealer = _sealers.get(dialect)
    return data if sealer is None else _changed(data, lambda text: _seal(sealer, text))


def opened(dialect: Dialect, data: Any) -> Any:
    """Data with its webhook addresses in clear text."""
    return _changed(data, lambda text: _open(dialect, text))


class AddressJson(TypeDecorator[Any]):
    """JSON of rule configs, receivers or a webhook's payload."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """To the database."""
        return sealed(dialect, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """From the database."""
        return opened(dialect, value)


class SealedText(TypeDecorator[str]):
    """Text that may hold an address anywhere: sealed as a whole."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database."""
        sealer = _sealers.get(dialect)
        return value if sealer is None or not value else _seal(sealer, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """From the database."""
        return _open(dialect, value, "") if isinstance(value, str) else value


def _seal(sealer: Sealer, text: str) -> str:
    return text if text.startswith(_PREFIX) else _PREFIX + sealer.seal(_PLACE, text)


def _open(dialect: Dialect, text: str, unreadable: str = UNREADABLE) -> str:
    if not text.startswith(_PREFIX):
        return text
    sealer = _sealers.get(dialect)
    try:
        if sealer is not None:
            return sealer.open(_PLACE, text.removeprefix(_PREFIX))
        problem = "the service has no key"
    except ConfigError as error:
        problem = error.what
    _log.error("a webhook address in the database cannot be opened (%s): nothing is posted there", problem)
    return unreadable


def _changed(data: Any, change: Callable[[str], str]) -> Any:
    """A copy of data in which each webhook's address is changed; actions and payloads are looked for where they can be."""
    if isinstance(data, list):
        return [_changed(each, change) for each in data]
    if not isinstance(data, dict):
        return data
    made = dict(data)
    if isinstance(made.get("url"), str) and (made.get("kind") == "webhook" or "event" in made):
        made["url"] = change(made["url"])
    if isinstance(made.get("actions"), list):
        made["actions"] = _changed(made["actions"], change)
    if set(made) == {"webhook"} and isinstance(made["webhook"], str):  # as rule files write it
        made["webhook"] = change(made["webhook"])
    return made
