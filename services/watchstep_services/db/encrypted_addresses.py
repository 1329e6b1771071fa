"""Columns with encrypted webhook addresses, which are secrets because they allow posting.

The database's engine has the key (`use_cipher`). Values are encrypted when they are bound and decrypted when they are read, so that
no other part of the service handles encrypted ones. Values in plain text, of an earlier version or of a service without a key, are
read unchanged. A value that cannot be decrypted is read as `UNREADABLE`, an address that does not exist: the rule that names it
is still evaluated and stops jobs, and its webhook fails visibly.
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
    """Encrypts text for a place, and decrypts it."""

    def encrypt(self, place: str, secret: str) -> str:
        """Encrypt a secret."""

    def decrypt(self, place: str, encrypted: str) -> str:
        """Decrypt the result of `encrypt`.

        Raises:
            ConfigError: it was encrypted with another key.
        """


_ciphers: WeakKeyDictionary[Dialect, Cipher] = WeakKeyDictionary()


def use_cipher(dialect: Dialect, cipher: Cipher) -> None:
    """Encrypt addresses that are written by the engine of this dialect from now on."""
    _ciphers[dialect] = cipher


def encrypted(dialect: Dialect, data: Any) -> Any:
    """Data with encrypted webhook addresses; unchanged if the engine has no key."""
    cipher = _ciphers.get(dialect)
    return data if cipher is None else _changed(data, lambda text: _encrypt(cipher, text))


def opened(dialect: Dialect, data: Any) -> Any:
    """Data with decrypted webhook addresses."""
    return _changed(data, lambda text: _open(dialect, text))


class AddressJson(TypeDecorator[Any]):
    """JSON of rule configs, receivers or a webhook's payload."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Convert a value for the database."""
        return encrypted(dialect, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Convert a value from the database."""
        return opened(dialect, value)


class EncryptedText(TypeDecorator[str]):
    """Text that may contain an address anywhere; encrypted as a whole."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Convert a value for the database."""
        cipher = _ciphers.get(dialect)
        return value if cipher is None or not value else _encrypt(cipher, value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Convert a value from the database."""
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
    _log.error("a webhook address in the database cannot be decrypted (%s): nothing is posted to it", problem)
    return unreadable


def _changed(data: Any, change: Callable[[str], str]) -> Any:
    """A copy of data with each webhook's address changed, in rule configs and payloads."""
    if isinstance(data, list):
        return [_changed(item, change) for item in data]
    if not isinstance(data, dict):
        return data
    copy = dict(data)
    if isinstance(copy.get("url"), str) and (copy.get("kind") == "webhook" or "event" in copy):
        copy["url"] = change(copy["url"])
    if isinstance(copy.get("actions"), list):
        copy["actions"] = _changed(copy["actions"], change)
    if set(copy) == {"webhook"} and isinstance(copy["webhook"], str):  # the form of rule files
        copy["webhook"] = change(copy["webhook"])
    return copy
