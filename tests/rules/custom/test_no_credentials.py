"""A user's rule that searches for credentials of the evaluating process finds none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from tests.rules.custom.programs import attack
from tests.rules.runs import all_at_once, in_steps, norms
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox import process
from watchstep_rules.custom.sql.rule import QUERIES_CHECKED
from watchstep_rules.engine.judge import RuleHealth

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIA-not-for-rules",
    "AWS_SECRET_ACCESS_KEY": "secret-not-for-rules",
    "AWS_SESSION_TOKEN": "session-not-for-rules",
    "WATCHSTEP_DATABASE_URL": "postgresql://service:password-not-for-rules@database/watchstep",
    "WATCHSTEP_BROKER_URL": "redis://:broker-not-for-rules@redis/0",
    "WATCHSTEP_SECRET_KEY": "key-not-for-rules",
    "WATCHSTEP_TOKEN": "token-not-for-rules",
}
MARK = "not-for-rules"
ROWS = in_steps(norms("first", [1.0, 1.0]))

LOOK = """
mark = "-".join(("not", "for", "rules"))  # not the mark itself: this text lies in memory too
seen = []

def look(where, read):
    try:
        content = read()
    except OSError:
        return
    text = content if isinstance(content, str) else content.decode("latin-1")
    if mark in text:
        seen.append(where)

def whole(path):
    with open(path, "rb") as file:
        return file.read()

def descriptor(number):
    if os.fstat(number).st_mode & 0o170000 == 0o010000:
        return ""  # a pipe to the process that asks: nothing waits in it
    return os.pread(number, 65536, 0)

look("environ", lambda: repr(dict(os.environ)))
for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "WATCHSTEP_DATABASE_URL"):
    look(name, lambda: str(os.environ.get(name)) + str(os.getenv(name)))
LIBC.getenv.restype = ctypes.c_char_p
for name in (b"AWS_SECRET_ACCESS_KEY", b"WATCHSTEP_DATABASE_URL"):
    look(name.decode(), lambda: LIBC.getenv(name) or b"")
for process in ("self", "thread-self", str(os.getpid()), str(os.getppid())):
    for file in ("environ", "cmdline", "mem", "maps"):
        look(process + "/" + file, lambda: whole("/proc/" + process + "/" + file))
for path in ("~/.aws/credentials", "~/.aws/config", "~/.watchstep/service.json"):
    look(path, lambda: whole(os.path.expanduser(path)))
for number in range(3, 256):
    look("descriptor " + str(number), lambda: descriptor(number))
look("arguments", lambda: repr(sys.argv) + repr(sys.orig_argv))
return f"{seen}"
"""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process's environment, and in a file that is open and would be inherited."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryFile() as file:
        file.write(repr(SECRETS).encode())
        file.flush()
        os.set_inheritable(file.fileno(), True)
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
def test_a_program_finds_none(secrets: None) -> None:
    outcome = all_at_once(attack(LOOK, "credentials.py"), ROWS)
    assert outcome.memory.health is RuleHealth.OK, outcome.memory.problem
    assert {finding.message for finding in outcome.findings} == {"[]"}


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
def test_the_program_finds_credentials_outside_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "AWS_SECRET_ACCESS_KEY"
    monkeypatch.setitem(process._ENVIRONMENT, name, SECRETS[name])
    outcome = all_at_once(attack(LOOK, "given.py"), ROWS)
    assert {finding.message for finding in outcome.findings} == {f"{['environ', name, name]}"}


@pytest.mark.parametrize(
    "query",
    [
        "SELECT getenv('AWS_SECRET_ACCESS_KEY') AS tensor",
        "SELECT tensor, getenv('WATCHSTEP_DATABASE_URL') AS message FROM statistics",
        "SELECT content AS tensor FROM read_text('/proc/self/environ')",
        "SELECT content AS tensor FROM read_blob('/proc/self/fd/3')",
        "SELECT secret_string AS tensor FROM duckdb_secrets()",
        "SELECT current_setting('s3_secret_access_key') AS tensor",
        "SELECT * FROM '/proc/self/environ'",
        "SELECT tensor FROM SECRETS",
        "ATTACH 'postgresql://database/watchstep' AS service",
    ],
)
def test_a_query_for_credentials_is_refused(secrets: None, query: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RuleConfig.model_validate({"rule": "sql", "params": {"query": query}}, context=QUERIES_CHECKED)
    (error,) = refused.value.errors()
    assert error["loc"] == ("params", "query")
    assert MARK not in str(error["msg"])
