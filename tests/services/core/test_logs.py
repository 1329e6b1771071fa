"""What the log's lines say, in both forms."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from watchstep_services.core.telemetry import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level, filters = list(root.handlers), root.level, list(logs.FILTERS)
    yield
    root.handlers[:] = before
    root.setLevel(level)
    logs.FILTERS[:] = filters


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_have_fields() -> None:
    stream = io.StringIO()
    logs.configure("json", "INFO", stream)
    log = logging.getLogger("watchstep_services.test")
    with logs.fields(project="vision", run="run-1", attempt=None):
        log.info("one %d", 1)
        with logs.fields(action=7):
            log.warning("two\nlines")
    log.debug("unseen")
    try:
        dict[str, int]()["gone"]
    except KeyError:
        log.exception("failed")
    one, two, three = lines(stream)
    assert (one["message"], one["level"], one["logger"]) == ("one 1", "info", "watchstep_services.test")
    assert (one["project"], one["run"]) == ("vision", "run-1")
    assert "attempt" not in one
    assert one["time"].endswith("Z")
    assert (two["action"], two["run"], two["message"]) == (7, "run-1", "two\nlines")
    assert "run" not in three
    assert "KeyError: 'gone'" in three["fault"]


def test_text_lines_end_with_the_fields() -> None:
    stream = io.StringIO()
    logs.configure("text", "INFO", stream)
    with logs.fields(run="run-1"):
        logging.getLogger("a").warning("said")
    assert stream.getvalue().rstrip().endswith("WARNING a: said [run=run-1]")


@pytest.mark.parametrize("form", ["text", "json"])
def test_names_of_runs_neither_act_on_a_terminal_nor_make_up_lines(form: logs.Format) -> None:
    stream, hostile = io.StringIO(), "\x1b]0;owned\x07\x9b31m\u202e\n2026-01-01 ERROR forged"
    logs.configure(form, "INFO", stream)
    with logs.fields(run=hostile):
        logging.getLogger("a").warning("run %s", hostile)
    try:
        int(hostile)
    except ValueError:
        logging.getLogger("a").exception("failed")
    try:
        dict[str, int]()[hostile]
    except KeyError as error:
        logging.getLogger("a").error("failed", exc_info=ValueError(error.args[0]))  # noqa: TRY400 - its message as it is
    assert all(
        line.isprintable() and not line.startswith("2026-01-01 ERROR")
        for line in stream.getvalue().split("\n")
    )
    if form == "json":
        assert lines(stream)[0]["message"] == f"run {hostile}"


def test_uvicorn_and_celery_go_the_same_way_and_once() -> None:
    names = ("uvicorn.error", "uvicorn.access", "celery.worker", "celery.redirected")
    for name in names:  # as in a new process: a server of another test may have made them quiet
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).propagate = True
    stream = io.StringIO()
    for _ in range(2):
        logs.configure("json", "INFO", stream)
    for name in names:
        logging.getLogger(name).info("from %s", name)
    logging.getLogger("httpx").info("HTTP Request: …")
    assert [line["logger"] for line in lines(stream)] == [
        "uvicorn.error", "uvicorn.access", "celery.worker", "celery.redirected",
    ]  # fmt: skip


def test_filters_pass_over_every_record() -> None:
    class NoSecret(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            record.msg, record.args = record.getMessage().replace("hunter2", "***"), ()
            return True

    logs.FILTERS.append(NoSecret())
    stream = io.StringIO()
    logs.configure("json", "INFO", stream)
    logging.getLogger("uvicorn.error").info("password %s", "hunter2")
    assert lines(stream)[0]["message"] == "password ***"


def test_threads_do_not_share_fields() -> None:
    seen: list[dict[str, Any]] = []
    with logs.fields(run="mine"):
        thread = threading.Thread(target=lambda: seen.append(dict(logs.current())))
        thread.start()
        thread.join()
        assert logs.current() == {"run": "mine"}
    assert seen == [{}]
