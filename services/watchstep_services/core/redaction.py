"""Secrets are taken out of all that is written for people: log lines, problems, what the commands print.

What looks like a secret goes by its form. What is one and looks like nothing goes by its value: `keep_secret` names it.

Addresses of webhooks in rule configs: who has one may post there, as with Slack, so they are secrets.

Those who may operate see them where they read rule configs. Nobody sees them in events, the audit log and notifications: what
is said there goes to receivers, too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from watchstep.errors import WatchstepError

HIDDEN = "***"
_LONGEST = 65_536
_SHORTEST = 6
"""Shorter values are words that a log is full of; who keeps a secret with one of them has none."""

_NAMES = (
    r"[a-z0-9_-]{0,40}(?:password|passwd|secret|secret[_-]?key|signing[_-]?key|private[_-]?key|api[_-]?key|access[_-]?key"
    r"|access[_-]?token|auth[_-]?token|session[_-]?token|security[_-]?token|signature|credentials?)"
)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), shown)
    for pattern, shown in (
        # Watchstep's own: the id is public.
        (r"\bwst_([0-9a-f]{16})_[A-Za-z0-9_-]{8,}", rf"wst_\1_{HIDDEN}"),
        (r"\bws_[A-Za-z0-9_-]{20,}", f"ws_{HIDDEN}"),
        # scheme://user:password@host; the password may hold what a URL may not, up to the last @ before the path.
        (r"\b([a-z][a-z0-9+.-]{1,30}://[^\s:/@'\"]{0,256}):[^\s/'\"]{1,512}@", rf"\1:{HIDDEN}@"),
        (
            r"\b(authorization['\"]?\s*[:=,]\s*(?:b?['\"])?)(?:(?:bearer|basic|digest|token)\s+)?[^\s'\",;]+",
            rf"\1{HIDDEN}",
        ),
        (r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", rf"\1 {HIDDEN}"),
        (r"(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)[^\s'\"<>]+", rf"\1{HIDDEN}"),
        # Of a query: also those of signed addresses of S3, GCS and Azure.
        (
            rf"([?&](?:{_NAMES}|sig|token|key|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s'\"#]+",
            rf"\1{HIDDEN}",
        ),
        # Of JSON, of Python's own form of a dictionary, of key=value.
        (rf"(['\"]{_NAMES}['\"]\s*:\s*)(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')", rf"\1'{HIDDEN}'"),
        (rf"\b({_NAMES}=)(?:\"[^\"]*\"|'[^']*'|[^\s&,;)'\"]+)", rf"\1{HIDDEN}"),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", f"{HIDDEN}"),
    )
)
_values: frozenset[str] = frozenset()
_lock = threading.Lock()


def keep_secret(value: str) -> None:
    """From now on this value is in nothing that this process writes for people. Too short a one is not hidden."""
    global _values  # noqa: PLW0603 - of the process, as its log is
    forms = {value, quote(value, safe=""), unquote(value)}
    forms |= {_without_forms(form) for form in forms}  # as `redact` meets them
    with _lock:
        _values |= {form for form in forms if len(form) >= _SHORTEST}


def keep_secrets_of(url: str) -> None:
    """As `keep_secret`, for the password in a URL; none where there is none."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return
    if password:
        keep_secret(password)


def redact(text: str) -> str:
    """The text without secrets; of a very long one the start."""
    # Forms first: a password "password" would hide the names that others are known by.
    text = _without_forms(text[:_LONGEST])
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def _without_forms(text: str) -> str:
    for pattern, shown in _FORMS:
        text = pattern.sub(shown, text)
    return text


class Redacted(logging.Filter):
    """Takes secrets out of a record: its message, its fields and its trace back."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always lets it through."""
        record.msg, record.args = redact(_message(record)), None
        if record.exc_info and not record.exc_text:
            record.exc_text = redact_lines(traceback.format_exception(*record.exc_info)).rstrip("\n")
        elif record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        fields: dict[str, Any] | None = getattr(record, "watchstep_fields", None)
        if fields:
            record.watchstep_fields = {
                name: redact(value) if isinstance(value, str) else value for name, value in fields.items()
            }
        return True


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - arguments that do not fit: logging itself would print them, unredacted
        return f"{record.msg!s} (its arguments do not fit)"


Error = TypeVar("Error", bound=WatchstepError)


def redacted(error: Error) -> Error:
    """The same error without secrets, to be told to somebody."""
    error.what, error.hint = redact(error.what), redact(error.hint)
    error.args = (f"{error.what}\n  hint: {error.hint}",)
    return error


def redacted_fault(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:  # as sys.excepthook
    """Writes what nobody expected to standard error, without secrets."""
    if issubclass(kind, KeyboardInterrupt):
        return
    sys.stderr.write(redact_lines(traceback.format_exception(kind, error, trace)))


def redact_lines(lines: list[str]) -> str:
    """A text of lines without secrets; each may be as long as one that `redact` takes."""
    return "".join(redact(line) for line in lines)


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
