"""What can go wrong between a launcher and what runs the job, told apart by what to do about it."""

from __future__ import annotations

from watchstep.errors import ConfigError, NotFoundError, WatchstepError


class BackendError(WatchstepError):
    """A backend could not do what it was asked."""


class SubmissionRejectedError(BackendError, ConfigError):
    """The backend took no job, and none of it runs: correct what was submitted. Trying the same again is of no use."""


class BackendDownError(BackendError):
    """The backend does not answer, or said that it cannot now. Nothing is known of the job by it: try again later."""


class CredentialsExpiredError(BackendError):
    """The backend refused who asks: credentials are missing, have expired, or do not suffice.

    The job goes on. Ask again once the credentials are renewed.
    """


class MissingRightError(CredentialsExpiredError):
    """The backend knows who asks, and does not allow it."""


class JobNotFoundError(BackendError, NotFoundError):
    """No job goes by this id now."""
