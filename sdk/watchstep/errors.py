"""The errors a user can meet. Each names the object, the value, and a hint."""

from __future__ import annotations

from typing import Any


class WatchstepError(Exception):
    """Something a user can correct.

    Args:
        what: the thing and its value, e.g. ``"store s3://ml/runs: access denied"``.
        hint: what to do about it, one sentence.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n  hint: {hint}")
        self.what = what
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by attributes, so that an error reaches the parent of a worker process whatever its constructor takes."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[WatchstepError], args: tuple[Any, ...], state: dict[str, Any]) -> WatchstepError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(WatchstepError):
    """An argument, environment variable or file that cannot be used as it is."""


class BadNameError(ConfigError):
    """A run, project or attempt name that could leave its place on the store."""


class StoreError(WatchstepError):
    """The object store refused, is missing, or cannot be reached."""


class MissingStoreError(StoreError):
    """The store itself, its folder or bucket, is not there."""


class RecordingEndedError(StoreError):
    """The recording that would write has ended. No fault: what is left waits on disk, or was counted."""


class NotFoundError(StoreError):
    """The object, run or tensor is not there."""


class FormatError(WatchstepError):
    """An object whose bytes are not what they claim to be."""


class RuleError(WatchstepError):
    """An unknown rule, a wrong parameter, or a rule file that cannot be read."""


class ServiceError(WatchstepError):
    """The service answered with a refusal, or does not answer."""
