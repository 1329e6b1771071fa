"""Translates obstore's exceptions to Watchstep's errors.

obstore raises specific types for some errors and a `GenericError` for others. The reason for a folder's error is determined by another
call of the file system. obstore reports a cloud's response (HTTP status and error code) only in its message: `CloudAnswer` parses it,
and tests verify that with a server. Keys and URLs in a message cannot be mistaken for it, because they are percent-encoded.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from watchstep.errors import MissingStoreError, NotFoundError, StoreError

PROVIDERS = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Provider of each scheme: S3, Google Cloud Storage or Azure Blob Storage."""

Verb = Literal["read", "write", "list", "delete"]

_REQUEST = re.compile(r"Error performing [A-Z]+ (?P<url>[a-z]+://\S+) in \S+")
_STATUS = re.compile(r" - Server returned non-2xx status code: (?P<status>[0-9]{3})\b")
_CODE = re.compile(r"<Code>(?P<code>[A-Za-z]+)</Code>")
_DELETION = re.compile(r"request failed for key .* \(code: (?P<code>[A-Za-z0-9]+)\)$", re.MULTILINE)
"""A deletion is one of a batch, whose answer has a code for each object: the provider's, or an HTTP status."""
_MISSING_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_DENIED = frozenset({401, 403})
_DENIED_CODES = frozenset({"AccessDenied", "Forbidden"})
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
"""AWS answers expired credentials with status 400."""
_METADATA_SERVICES = frozenset({"169.254.169.254", "metadata.google.internal"})
"""The last place where clients look for credentials, used only if nothing else configures any."""

_NO_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, run 'gcloud auth application-default login', or use a service account of the machine",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or use a managed identity",
}

_MAX_REASON = 300


@dataclass(frozen=True)
class FailedCall:
    """A failed request to a store.

    Attributes:
        verb: The operation.
        key: The object or prefix.
        url: URL of the store.
        location: Location of the object for messages.
        path: Path of the object in a local folder; None in a cloud.
    """

    verb: Verb
    key: str
    url: str
    location: str
    path: str | None


@dataclass(frozen=True)
class CloudAnswer:
    """A cloud's error response.

    Attributes:
        host: Host of the request; empty without a request.
        status: HTTP status; 0 without a response.
        code: Error code of the service, e.g. ``NoSuchBucket``; empty without one.
    """

    host: str = ""
    status: int = 0
    code: str = ""

    @classmethod
    def of(cls, error: Exception) -> CloudAnswer:
        """Parse obstore's message."""
        text = str(error)
        if deletion := _DELETION.search(text.split("\n", 1)[0]):
            code = deletion["code"]
            return cls("", int(code), "") if code.isdigit() else cls("", 0, code)
        request = _REQUEST.search(text)
        status = _STATUS.search(text, request.end()) if request else None
        host = (urlsplit(request["url"]).hostname or "") if request else ""
        if status is None:
            return cls(host)
        code = _CODE.search(text, status.end())
        return cls(host, int(status["status"]), code["code"] if code else "")


def is_denied(error: Exception) -> bool:
    """Return whether a cloud refused a request because of missing permissions or credentials."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return True
    answer = CloudAnswer.of(error)
    return answer.status in _DENIED or answer.code in _DENIED_CODES


def translate(error: Exception, call: FailedCall) -> StoreError:
    """Return the error for a store's caller.

    Args:
        error: obstore's exception.
        call: The failed request.
    """
    return _of_cloud(error, call) if call.path is None else _of_folder(error, call, call.path)


def not_found(call: FailedCall) -> NotFoundError:
    """Return the error for a missing object."""
    return NotFoundError(f"object {call.location}: not found", "check the run's URL and the name")


def _of_cloud(error: Exception, call: FailedCall) -> StoreError:
    answer = CloudAnswer.of(error)
    is_missing = isinstance(error, FileNotFoundError)
    if answer.code in _MISSING_BUCKET or (
        # Some servers answer without a code. Objects that are written or listed need not exist.
        call.verb in {"write", "list"} and (is_missing or answer.status == 404)
    ):
        return MissingStoreError(
            f"store {call.url} has no such bucket", "create the bucket, or correct the URL"
        )
    if is_missing:
        return not_found(call)
    if answer.host in _METADATA_SERVICES:
        return StoreError(
            f"store {call.url}: no credentials found, cannot {call.verb} {call.key!r}",
            _NO_CREDENTIALS[PROVIDERS[urlsplit(call.url).scheme]],
        )
    if answer.code in _EXPIRED_CODES:
        return StoreError(
            f"store {call.url}: the credentials have expired, cannot {call.verb} {call.key!r} ({answer.code})",
            "renew them; a role or a profile renews credentials by itself",
        )
    if is_denied(error):
        return _denied(call, answer.code)
    return _other(error, call)


def _of_folder(error: Exception, call: FailedCall, path: str) -> StoreError:
    from obstore.exceptions import InvalidPathError

    if isinstance(error, FileNotFoundError) and call.verb in {"read", "delete"}:
        return not_found(call)
    reason = 0 if isinstance(error, InvalidPathError) else refusal_of_folder(path, call.verb)
    if reason == errno.ENOTDIR:
        if call.verb != "write":
            return not_found(call)
        return StoreError(
            f"store {call.url}: cannot write {call.key!r} (a part of it is an object already)",
            "choose another name, or remove that file",
        )
    if reason in {errno.EACCES, errno.EPERM} or isinstance(error, PermissionError):
        return _denied(call)
    return _other(error, call)


def refusal_of_folder(path: str, verb: Verb) -> int:
    """Return the file system's reason for a refusal at a path as `errno`; 0 if it is unknown."""
    try:
        if verb == "read":
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        elif verb == "list":
            os.scandir(path).close()
        else:
            folder = os.path.dirname(path)  # noqa: PTH120 - as obstore names it
            while not _exists(folder):
                folder = os.path.dirname(folder)  # noqa: PTH120
            if not stat.S_ISDIR(os.stat(folder).st_mode):  # noqa: PTH116
                return errno.ENOTDIR
            if not os.access(folder, os.W_OK | os.X_OK):
                return errno.EACCES
    except OSError as error:
        return error.errno or 0
    return 0


def _exists(path: str) -> bool:
    try:
        os.stat(path)  # noqa: PTH116 - as obstore names it
    except FileNotFoundError:
        return False
    return True


def _denied(call: FailedCall, code: str = "") -> StoreError:
    return StoreError(
        f"store {call.url}: access denied, cannot {call.verb} {call.key!r}" + (f" ({code})" if code else ""),
        "check the credentials and their permissions (for a folder: its owner and mode)",
    )


def _other(error: Exception, call: FailedCall) -> StoreError:
    line = str(error).strip().split("\n", 1)[0]
    reason = line[:_MAX_REASON] or type(error).__name__
    return StoreError(
        f"store {call.url}: cannot {call.verb} {call.key!r} ({reason})",
        "check the URL, and that the store is reachable",
    )
