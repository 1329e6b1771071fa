"""Secrets that are kept in the database, sealed with the service's key (Fernet: AES-128-CBC with HMAC-SHA256)."""

from __future__ import annotations

import json

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from watchstep.errors import ConfigError
from watchstep_services.settings import Settings

KEY_SETTING = "WATCHSTEP_SECRET_KEY"
_MAKE = "make one with 'watchstep receivers new-key'"


def new_key() -> str:
    """A key for the setting."""
    return Fernet.generate_key().decode()


class Seal:
    """Seals and opens. Of several keys the first seals and each opens, so that a key can be replaced."""

    def __init__(self, settings: Settings) -> None:
        written = settings.secret_key.get_secret_value() if settings.secret_key is not None else ""
        self._fernet: MultiFernet | None = None
        keys = [key.strip() for key in written.split(",") if key.strip()]
        if keys:
            try:
                self._fernet = MultiFernet([Fernet(key) for key in keys])
            except ValueError:
                # Without the value: it is the one secret that opens all others.
                raise ConfigError(
                    f"{KEY_SETTING}: not a key", f"{_MAKE}; several have commas between"
                ) from None

    def seal(self, place: str, secret: str) -> str:
        """Seal a secret for one place; nowhere else can it be opened.

        Raises:
            ConfigError: the service has no key.
        """
        return self._opened().encrypt(json.dumps([place, secret]).encode()).decode()

    def open(self, place: str, sealed: str) -> str:
        """Open what `seal` made for the same place.

        Raises:
            ConfigError: the service has no key, or another one.
        """
        try:
            held = json.loads(self._opened().decrypt(sealed.encode()))
        except InvalidToken:
            raise ConfigError(
                f"secret of {place}: sealed with another key",
                f"give the secret anew, or add the key that sealed it to {KEY_SETTING}, behind a comma",
            ) from None
        if held[0] != place:
            raise ConfigError(f"secret of {place}: sealed for {held[0]}", "give the secret anew")
        return str(held[1])

    def _opened(self) -> MultiFernet:
        if self._fernet is None:
            raise ConfigError(
                f"{KEY_SETTING} is not set, so that secrets cannot be kept",
                f"{_MAKE} and set it, or have who runs the service put the secret into its environment",
            )
        return self._fernet
