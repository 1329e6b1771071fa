"""The log: what a line looks like, and which run, attempt, action or request it belongs to.

``fields`` marks all lines of a block; with ``WATCHSTEP_LOG=json`` they are fields of their own, else they end the line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Literal, TextIO

from watchstep.platform.terminal_text import escaped_json, printable, printable_lines
from watchstep_services.core.redaction import Redacted
from watchstep_services.core.telemetry import tracing

Format = Literal["text", "json"]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Value = str | int

_NOTHING: Mapping[str, Value] = MappingProxyType({})
_fields: ContextVar[Mapping[str, Value]] = ContextVar("watchstep_log_fields", default=_NOTHING)

FILTERS: list[logging.Filter] = [Redacted()]
"""Pass over every record before it is written; they may change it. For secrets to be taken out of it."""

_QUIET = (
    "alembic", "botocore", "httpcore", "httpx", "urllib3",
    "celery.app.trace", "celery.beat", "celery.worker.strategy",  # several lines a second, of sweeps that find nothing
)  # fmt: skip
_MAX_TEXT = 16_384


@contextmanager
def fields(**values: Value | None) -> Iterator[None]:
    """Mark the log lines of a block: ``project``, ``run``, ``attempt``, ``action``; None leaves one out."""
    added = {name: value for name, value in values.items() if value is not None}
    token = _fields.set({**_fields.get(), **added})
    try:
        yield
    finally:
        _fields.reset(token)


def current() -> dict[str, Value]:
    """The fields of a line that is written now, with the trace where there is one."""
    trace = tracing.current_trace_id()
    return {**_fields.get(), **({"trace": trace} if trace else {})}


def configure(form: Format, level: Level = "INFO", stream: TextIO | None = None) -> None:
    """Write everything that this process logs, uvicorn and Celery included, to one stream (standard error).

    Safe to repeat. Call it before threads start.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_mark)
    for each in FILTERS:
        handler.addFilter(each)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    for old in [held for held in root.handlers if getattr(held, "watchstep", False)]:
        root.removeHandler(old)
    handler.watchstep = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
    # Not "uvicorn.access": uvicorn itself keeps it quiet where requests are not to be logged.
    for name in ("uvicorn", "uvicorn.error", "celery", "celery.redirected"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _mark(record: logging.LogRecord) -> bool:
    if not hasattr(record, "watchstep_fields"):
        record.watchstep_fields = current()
    return True


def _fields_of(record: logging.LogRecord) -> dict[str, Value]:
    held: dict[str, Value] = getattr(record, "watchstep_fields", {})
    return held


class JsonLines(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, the fields, and a fault's trace back."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MAX_TEXT],
            **_fields_of(record),
            "process": record.process,
        }
        if record.exc_info or record.exc_text:
            fault = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else "")
            line["fault"] = fault[-_MAX_TEXT:]
        return escaped_json(json.dumps(line, ensure_ascii=False, default=str))


class TextLines(logging.Formatter):
    """For people: time, level, message, then the fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, and a trace back below it. What they name comes from programs, and makes up no line that looks like a record's."""
        return printable_lines(super().format(record)).replace("\n", "\n  ")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line, with its fields and without a trace back."""
        text = super().formatMessage(record)
        told = " ".join(f"{name}={printable(value)}" for name, value in _fields_of(record).items())
        return f"{text} [{told}]" if told else text
