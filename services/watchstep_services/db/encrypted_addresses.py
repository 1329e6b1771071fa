"""Columns whose webhook addresses are encrypted at rest: whoever has such an address may post there.

The database's engine has the key (`use_cipher`); values are encrypted when they are bound and opened when they are read, so that
nothing else of the service sees an encrypted one. Values in plain text, of an earlier version or of a service without a key, are
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


class Cipher(Protocol):
    """Seals text for a place, and opens it."""

    def encrypt(self, place: str, secret: str) -> str:
        """Seal a secret."""

    def decrypt(self, place: str, encrypted: str) -> str:
        """Decrypt what `encrypt` returned.

        Raises:
            ConfigError: it was encrypted with another key.
        """


_ciphers: WeakKeyDictionary[Dialect, Cipher] = WeakKeyDictionary()


def use_cipher(dialect: Dialect, cipher: Cipher) -> None:
    """Seal addresses that are written by the engine of this dialect from now on."""
    _ciphers[dialect] = cipher


def encrypted(dialect: Dialect, data: Any) -> Any:
    """Data with its webhook addresses encrypted; as it is where the engine has no key."""
    cipher = _ciphers.get(dialect)
    return data if cipher is None else _changed(data, lambda text: _encrypt(cipher, text))


def opened(dialect: Dialect, data: Any) -> Any:
    """Data with its webhook addresses in clear text."""
    return _changed(data, lambda text: _open(dialect, text))


class AddressJson(TypeDecorator[Any]):
    """JSON of rule configs, receivers or a webhook's payload."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """To the database."""
        return encrypted(dialect, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """From the database."""
        return opened(dialect, value)


class EncryptedText(TypeDecorator[str]):
    """Text that may hold an address anywhere: encrypted as a whole."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database."""
        cipher = _ciphers.get(dialect)
        return value if cipher is None or not value else _encrypt(cipher, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """From the database."""
        return _open(dialect, value, "") if isinstance(value, str) else value


def _encrypt(cipher: Cipher, text: str) -> str:
    return text if text.startswith(_PREFIX) else _PREFIX + cipher.encrypt(_PLACE, text)


def _open(dialect: Dialect, text: str, unreadable: str = UNREADABLE) -> str:
    if not text.startswith(_PREFIX):
        return text
    cipher = _ciphers.get(dialect)
    try:
        if cipher is not None:
            return cipher.decrypt(_PLACE, text.removeprefix(_PREFIX))
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
