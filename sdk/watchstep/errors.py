"""User-facing errors. Each names the object, the value, and a hint."""

from __future__ import annotations

from typing import Any


class WatchstepError(Exception):
    """An error that a user can correct.

    Args:
        what: the object and its value, e.g. ``"store s3://ml/runs: access denied"``.
        hint: how to correct it, in one sentence.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n  hint: {hint}")
        self.what = what
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by attributes, so that an error can leave a worker process regardless of its constructor's arguments."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[WatchstepError], args: tuple[Any, ...], state: dict[str, Any]) -> WatchstepError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(WatchstepError):
    """An argument, environment variable or file is invalid."""


class BadNameError(ConfigError):
    """A run, project or attempt name could escape its folder on the store."""


class StoreError(WatchstepError):
    """The store refuses access, is missing, or cannot be reached."""


class MissingStoreError(StoreError):
    """The store's folder or bucket does not exist."""


class RecordingEndedError(StoreError):
    """The recording that tries to write has ended. This is not a fault: its remaining data is on disk, or was counted as dropped."""


class NotFoundError(StoreError):
    """The object, run or tensor does not exist."""


class FormatError(WatchstepError):
    """An object's bytes do not have the expected format."""


class RuleError(WatchstepError):
    """A rule is unknown, has an invalid parameter, or its file cannot be read."""


class ServiceError(WatchstepError):
    """The service refuses a request or does not answer."""
