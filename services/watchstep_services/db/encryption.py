"""Encryption of secrets in the database with the service's key (Fernet: AES-128-CBC with HMAC-SHA256)."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from contextlib import suppress

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from watchstep.errors import ConfigError
from watchstep_services.core.redaction import keep_secret
from watchstep_services.core.settings import Settings
from watchstep_services.db.encrypted_addresses import use_cipher
from watchstep_services.db.engine import Database, DatabaseTimeouts, open_database

KEY_FILE = "secret.key"
KEY_SETTING = "WATCHSTEP_SECRET_KEY"
_CREATE = "create one with 'watchstep receivers new-key'"


def new_key() -> str:
    """Generate a key for the setting."""
    return Fernet.generate_key().decode()


class SecretBox:
    """Encrypts and decrypts secrets. The first of several keys encrypts and each decrypts, so that a key can be replaced.

    Args:
        settings: the settings with the keys.
        more: an additional key; empty for none.
    """

    def __init__(self, settings: Settings, more: str = "") -> None:
        written = settings.secret_key.get_secret_value() if settings.secret_key is not None else ""
        self._fernet: MultiFernet | None = None
        keys = [key.strip() for key in (*written.split(","), more) if key.strip()]
        if keys:
            try:
                self._fernet = MultiFernet([Fernet(key) for key in keys])
            except ValueError:
                # The message omits the value, because it decrypts all other secrets.
                raise ConfigError(
                    f"{KEY_SETTING}: not a valid key", f"{_CREATE}; separate several with commas"
                ) from None

    def encrypt(self, place: str, secret: str) -> str:
        """Encrypt a secret for one place. It cannot be decrypted for another place.

        Raises:
            ConfigError: the service has no key.
        """
        return self._opened().encrypt(json.dumps([place, secret]).encode()).decode()

    def decrypt(self, place: str, encrypted: str) -> str:
        """Decrypt the result of `encrypt` for the same place.

        Raises:
            ConfigError: the service has no key, or none that can decrypt it.
        """
        try:
            content = json.loads(self._opened().decrypt(encrypted.encode()))
        except InvalidToken:
            raise ConfigError(
                f"secret of {place}: encrypted with another key",
                f"give the secret again, or append the key that encrypted it to {KEY_SETTING}, after a comma",
            ) from None
        if content[0] != place:
            raise ConfigError(f"secret of {place}: encrypted for {content[0]}", "give the secret again")
        return str(content[1])

    def _opened(self) -> MultiFernet:
        if self._fernet is None:
            raise ConfigError(
                f"{KEY_SETTING}: not set, so secrets cannot be stored",
                f"{_CREATE} and set it, or have the service's owner put the secret into its environment",
            )
        return self._fernet

    @property
    def has_key(self) -> bool:
        """Whether there is a key."""
        return self._fernet is not None


def derived_keys(settings: Settings, purpose: str) -> tuple[bytes, ...]:
    """Keys for signatures of one purpose, derived from the keys of the service; empty if it has none.

    The first signs, and each verifies, as for `SecretBox`. No key of another purpose can be computed from them.

    Args:
        settings: the settings with the keys.
        purpose: name of the purpose.
    """
    written = settings.secret_key.get_secret_value() if settings.secret_key is not None else ""
    home = "" if settings.database_url.get_secret_value() else _key_of_home(settings)
    keys = dict.fromkeys(key.strip() for key in (*written.split(","), home) if key.strip())
    return tuple(
        hmac.new(key.encode(), f"watchstep {purpose}".encode(), hashlib.sha256).digest() for key in keys
    )


def open_encrypted_database(settings: Settings) -> Database:
    """Open the service's database, which encrypts the addresses of webhooks.

    The key is `WATCHSTEP_SECRET_KEY` or, if that is not set and the database is SQLite in the home, a key that
    is created in the home: ``secret.key``, mode 0600.

    Raises:
        ConfigError: the database cannot be opened, or a key is not valid.
    """
    database = open_database(settings.resolved_database_url, DatabaseTimeouts.of(settings))
    try:
        box = SecretBox(settings, "" if settings.database_url.get_secret_value() else _key_of_home(settings))
    except ConfigError:
        database.close()
        raise
    if box.has_key:
        use_cipher(database.engine.dialect, box)
    return database


def _key_of_home(settings: Settings) -> str:
    place = settings.home_folder / KEY_FILE
    try:
        if not place.parent.is_dir():
            return ""  # there is no service yet, and nothing to encrypt
        if not place.exists():
            # Created atomically, and never in place of a key that another process has just created.
            partial = place.with_name(f".{KEY_FILE}.{os.getpid()}")
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(new_key() + "\n")
                home = place.parent.stat()
                if (
                    home.st_uid != os.geteuid()
                ):  # a command run by root must not take the key from the service
                    os.fchown(file.fileno(), home.st_uid, home.st_gid)
            with suppress(FileExistsError):
                os.link(partial, place)
            partial.unlink()
        if stat.S_IMODE(place.stat().st_mode) != 0o600:
            place.chmod(0o600)
        key = place.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"key {place}: cannot be used ({error})",
            f"restore the file, readable by this user, from a backup, or set {KEY_SETTING}",
        ) from error
    keep_secret(key)
    return key
