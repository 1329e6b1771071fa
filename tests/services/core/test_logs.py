"""Logs, and what is redacted in them."""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from watchstep.errors import ConfigError
from watchstep_services.core import redaction
from watchstep_services.core.redaction import HIDDEN, Redacted, keep_secret, redact, redacted
from watchstep_services.core.settings import load_settings
from watchstep_services.core.telemetry import logs
from watchstep_services.db.engine import Database, open_database

WATCHSTEP = Path(sys.executable).with_name("watchstep")
SECRET = st.text("abcdefghijkmnopqrstuvwxyzABCDEFGH23456789", min_size=24, max_size=40).map(
    lambda text: f"Zz9{text}"
)
FORMS = (
    "wst_0123456789abcdef_{}", "token ws_{}: no", "postgresql://watchstep:{}@db:5432/x", "redis://:{}@redis/0",
    "amqp://a.b:p/{}@h", "Authorization: Bearer {}", "{{'authorization': 'Basic {}'}}", "(b'authorization', b'Bearer {}')",
    "bearer {} was sent", "https://hooks.slack.com/services/T0/B0/{}", "https://s3/x?X-Amz-Signature={}&y=1",
    "https://blob/x?sv=1&sig={}", '{{"signing_secret": "{}"}}', "{{'smtp_password': '{}', 'port': 25}}", "password={}, retry",
    "aws_secret_access_key={}", "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", "session_token='{}'", '{{"routing_key": "{}"}}',
    "https://x.logic.azure.com/workflows/1/triggers/manual/paths/invoke?sp=1&sig={}", "GET /picture.png?expires=1&signature={} HTTP/1.1",
)  # fmt: skip


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


@pytest.mark.parametrize("form", [form for form in FORMS if "p/{}" not in form])
@given(secret=SECRET)
def test_what_looks_like_a_secret_is_hidden(form: str, secret: str) -> None:
    shown = redact(f"before {form.format(secret)} after")
    assert secret not in shown
    assert HIDDEN in shown
    assert shown.startswith("before ")


@settings(max_examples=25)
@given(st.text(), SECRET, st.text())
def test_what_is_known_to_be_a_secret_is_hidden_wherever_it_stands(
    before: str, secret: str, after: str
) -> None:
    keep_secret(secret)
    assert secret not in redact(f"{before}{secret}{after}")


@pytest.mark.parametrize("common", ["password", "postgresql", "authorization", "0123456789abcdef"])
def test_a_secret_that_is_a_common_word_unhides_no_other(
    common: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_values", frozenset())  # and so it is forgotten again
    keep_secret(common)
    for form in [form for form in FORMS if "p/{}" not in form]:
        assert "tr0ub4dor-and-3-more-of-it" not in redact(form.format("tr0ub4dor-and-3-more-of-it"))


@pytest.mark.parametrize(
    "text",
    [
        "run vision/run-1: not known", "http://127.0.0.1:8642/v1/projects/vision/runs/run-1", "token 0123456789abcdef: not known",
        "database postgresql://watchstep@db/watchstep: does not answer", "a recorder token may not operate", "s3://ml/runs: denied",
        "layers.0.attention.key.weight at step 12: 3.5e+04", "mail to ann@example.org", "max_elements=-1: less than 0",
    ],
)  # fmt: skip
def test_what_is_none_stays_readable(text: str) -> None:
    assert redact(text) == text


def test_an_error_stays_the_error_that_it_is() -> None:
    error = redacted(ConfigError("url redis://:hunter2@redis: no", "hint password=hunter2"))
    assert (error.what, error.hint) == (f"url redis://:{HIDDEN}@redis: no", f"hint password={HIDDEN}")
    assert "hunter2" not in str(error)


@pytest.fixture
def written() -> io.StringIO:
    """What the log of a process writes, at the lowest level."""
    stream = io.StringIO()
    logs.configure("json", "DEBUG", stream)
    return stream


def test_a_record_whose_arguments_do_not_fit_is_no_way_round() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "two %s", ("many", "password=hunter2-x"), None)
    assert Redacted().filter(record)
    assert (record.getMessage(), record.args) == ("two %s (its arguments do not match)", None)


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_record_is_written_without_secrets_wherever_they_stand(form: Any, written: io.StringIO) -> None:
    logs.configure(form, "DEBUG", written)
    secret = secrets.token_urlsafe(32)
    log = logging.getLogger("watchstep.test")
    url = f"redis://:{secret}@redis/0"
    with logs.fields(run=f"password={secret}"):
        log.warning("no answer of %s: %r", url, {"password": secret}, stack_info=True)
        log.error("token wst_0123456789abcdef_%s", secret, exc_info=ConnectionError(url))
    out = written.getvalue()
    assert secret not in out
    assert "ConnectionError" in out
    assert "wst_0123456789abcdef_***" in out
    assert form == "json" or Path(__file__).name in out


def test_a_value_of_a_statement_is_in_no_error_of_the_database(sqlite: Database) -> None:
    import sqlalchemy as sa

    with pytest.raises(sa.exc.SQLAlchemyError) as caught, sqlite.write() as session:
        session.execute(sa.text("INSERT INTO nothing VALUES (:value)"), {"value": "hunter2-hunter2"})
    assert "hunter2" not in str(caught.value)


def test_settings_tell_no_secret() -> None:
    settings = load_settings(
        database_url="postgresql://watchstep:hunter2-a@db/x", broker_url="redis://:hunter2-b@redis/0"
    )
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    assert settings.resolved_database_url == "postgresql://watchstep:hunter2-a@db/x"
    assert "hunter2" not in redact("FATAL: password hunter2-a of watchstep; hunter2-b")
    with pytest.raises(ConfigError) as caught:
        load_settings(database_url=["hunter2-c"])
    assert "hunter2" not in str(caught.value)
    assert "WATCHSTEP_DATABASE_URL" in str(caught.value)


def test_a_password_in_a_url_that_cannot_be_used_is_not_told() -> None:
    with pytest.raises(ConfigError) as caught:
        open_database("mysql://watchstep:hunter2@db/x")
    assert "hunter2" not in str(redacted(caught.value))


@pytest.mark.ci
@pytest.mark.parametrize(
    "arguments",
    [
        ["tokens", "list"],
        ["tokens", "list", "--service", "http://user:{secret}@127.0.0.1:9"],
    ],
)  # fmt: skip
def test_the_commands_tell_no_secret(arguments: list[str], tmp_path: Path) -> None:
    secret = secrets.token_urlsafe(32)
    token = f"wst_0123456789abcdef_{secret}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WATCHSTEP_")}
    environment |= {
        "WATCHSTEP_DATABASE_URL": f"postgresql://watchstep:{secret}@127.0.0.1:9/none?connect_timeout=1",
        "WATCHSTEP_BROKER_URL": f"redis://:{secret}@127.0.0.1:9/0",
        "WATCHSTEP_TOKEN": token,
    }
    named = [each.format(token=token, secret=secret, home=tmp_path) for each in arguments]
    done = subprocess.run(
        [WATCHSTEP, *named], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode != 0
    assert done.stderr
    assert secret not in done.stdout + done.stderr
