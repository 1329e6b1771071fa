"""Redaction of secrets in everything that is written for people: log lines, problems, the commands' output.

Secrets with a known form are recognized by it. Others are redacted by their value, which `keep_secret` registers.

Addresses of webhooks in rule configs are secrets, too, because they allow posting, as with Slack. Operators see them in rule
configs. They are removed from events, the audit log and notifications, which are also sent to receivers.
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
"""Shorter values are ordinary words in logs, and not redacted."""

_NAMES = (
    r"[a-z0-9_-]{0,40}(?:password|passwd|secret|secret[_-]?key|signing[_-]?key|routing[_-]?key|private[_-]?key|api[_-]?key|access[_-]?key"
    r"|access[_-]?token|auth[_-]?token|session[_-]?token|security[_-]?token|signature|credentials?)"
)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), shown)
    for pattern, shown in (
        # Watchstep's own tokens; the id is public.
        (r"\bwst_([0-9a-f]{16})_[A-Za-z0-9_-]{8,}", rf"wst_\1_{HIDDEN}"),
        (r"\bws_[A-Za-z0-9_-]{20,}", f"ws_{HIDDEN}"),
        # scheme://user:password@host; the password may contain characters that URLs do not allow, up to the last @ before the path.
        (r"\b([a-z][a-z0-9+.-]{1,30}://[^\s:/@'\"]{0,256}):[^\s/'\"]{1,512}@", rf"\1:{HIDDEN}@"),
        (
            r"\b(authorization['\"]?\s*[:=,]\s*(?:b?['\"])?)(?:(?:bearer|basic|digest|token)\s+)?[^\s'\",;]+",
            rf"\1{HIDDEN}",
        ),
        (r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", rf"\1 {HIDDEN}"),
        (r"(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)[^\s'\"<>]+", rf"\1{HIDDEN}"),
        # Query parameters, including those of signed addresses of S3, GCS and Azure.
        (
            rf"([?&](?:{_NAMES}|sig|token|key|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s'\"#]+",
            rf"\1{HIDDEN}",
        ),
        # JSON, Python's representation of dictionaries, and key=value.
        (rf"(['\"]{_NAMES}['\"]\s*:\s*)(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')", rf"\1'{HIDDEN}'"),
        (rf"\b({_NAMES}=)(?:\"[^\"]*\"|'[^']*'|[^\s&,;)'\"]+)", rf"\1{HIDDEN}"),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", f"{HIDDEN}"),
    )
)
_values: frozenset[str] = frozenset()
_lock = threading.Lock()


def keep_secret(value: str) -> None:
    """Redact this value from now on in everything that this process writes for people. Too short values are not redacted."""
    global _values  # noqa: PLW0603 - shared by the process, as its log is
    forms = {value, quote(value, safe=""), unquote(value)}
    forms |= {_without_forms(form) for form in forms}  # `redact` sees the values in this form
    with _lock:
        _values |= {form for form in forms if len(form) >= _SHORTEST}


def keep_secrets_of(url: str) -> None:
    """As `keep_secret`, for the password in a URL, if it has one."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return
    if password:
        keep_secret(password)


def redact(text: str) -> str:
    """The text without secrets; a very long text is truncated."""
    # Forms first: a password "password" would otherwise replace the names by which others are recognized.
    text = _without_forms(text[:_LONGEST])
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def _without_forms(text: str) -> str:
    for pattern, shown in _FORMS:
        text = pattern.sub(shown, text)
    return text


class Redacted(logging.Filter):
    """Redacts a log record: its message, its fields and its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record; always returns True."""
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
    except Exception:  # noqa: BLE001 - mismatched arguments: logging itself would print them without redaction
        return f"{record.msg!s} (its arguments do not match)"


Error = TypeVar("Error", bound=WatchstepError)


def redacted(error: Error) -> Error:
    """Redact an error in place; return it."""
    error.what, error.hint = redact(error.what), redact(error.hint)
    error.args = (f"{error.what}\n  hint: {error.hint}",)
    return error


def redacted_fault(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:  # as sys.excepthook
    """Write an unexpected exception to standard error, redacted."""
    if issubclass(kind, KeyboardInterrupt):
        return
    sys.stderr.write(redact_lines(traceback.format_exception(kind, error, trace)))


def redact_lines(lines: list[str]) -> str:
    """Redact and join lines; the length limit of `redact` applies to each line."""
    return "".join(redact(line) for line in lines)


_KEYED = "webhook:"


def without_addresses(data: Any) -> Any:
    """JSON data with rule configs at any depth, with webhook addresses reduced to their host."""
    if isinstance(data, list):
        return [without_addresses(item) for item in data]
    if not isinstance(data, dict):
        return data
    reduced = {name: without_addresses(value) for name, value in data.items()}
    if reduced.get("kind") == "webhook" and "url" in reduced:
        reduced["url"] = host_of(reduced["url"])
    if set(reduced) == {"webhook"}:  # the form of rule files
        reduced["webhook"] = host_of(reduced["webhook"])
    return reduced


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
    """The key of the action that posts an event to a webhook; it distinguishes addresses without containing one."""
    return f"{_KEYED}{event_id}:{hashlib.sha256(address.encode()).hexdigest()[:16]}"


def shown_key(key: str) -> str:
    """An action's key for people; keys of earlier versions contained the address."""
    event_id, _, rest = key.removeprefix(_KEYED).partition(":")
    return action_key(event_id, rest) if key.startswith(_KEYED) and "://" in rest else key
