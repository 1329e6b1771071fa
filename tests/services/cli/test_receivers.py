from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.services.channels.http_server import HttpServer, http_server, status
from watchstep_services.channels.receiver_file import schema_text
from watchstep_services.channels.webhook import signing_key
from watchstep_services.cli.main import app
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

FILE = """
receivers:
  - {name: hook, kind: webhook, url: "URL", secret: {env: WATCHSTEP_RECEIVER_SECRET}}
  - {name: pager, kind: sns, phone_number: "+491701234567", region: eu-central-1}
route:
  receiver: hook
"""


def written(folder: Path, url: str = "https://hooks.example/a") -> Path:
    path = folder / "receivers.yaml"
    path.write_text(FILE.replace("URL", url), encoding="utf-8")
    return path


def test_a_file_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path)
    done = CliRunner().invoke(app, ["receivers", "check", str(path)])
    assert done.exit_code == 0, done.output
    assert "environment variable WATCHSTEP_RECEIVER_SECRET is not set" in done.output
    assert "all alerts -> hook" in done.output
    assert "by rules only" in done.output
    assert f"{path}:3: warning: hook: " in done.output
    path.write_text(path.read_text(encoding="utf-8").replace("sns", "sms"), encoding="utf-8")
    done = CliRunner().invoke(app, ["receivers", "check", str(path)])
    assert (done.exit_code, f"{path}:4: error: receivers.1: " in done.output) == (1, True)


@pytest.mark.parametrize(
    ("written_as", "instead", "line", "words"),
    [
        ("name: pager", "name: hook", 4, "duplicate receiver name 'hook'"),
        (
            "receiver: hook",
            "routes: [{matchers: ['a=b'], receiver: nobody}]",
            6,
            "that do not exist: nobody",
        ),
        ("{env: WATCHSTEP_RECEIVER_SECRET}", "whsec_abc", 3, "which must not be in the file"),
    ],
)
def test_problems_of_the_whole_file_have_a_line(
    tmp_path: Path, written_as: str, instead: str, line: int, words: str
) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace(written_as, instead), encoding="utf-8")
    done = CliRunner().invoke(app, ["receivers", "check", str(path)])
    assert done.exit_code == 1
    assert f"{path}:{line}: error: " in done.output
    assert words in done.output


def test_a_running_service_sends_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CliRunner().invoke(app, ["receivers", "new-secret"]).output.strip()
    assert signing_key(made)
    monkeypatch.setenv("WATCHSTEP_RECEIVER_SECRET", made)
    with http_server() as server:
        settings = load_settings(
            home=tmp_path / "home",
            store=str(tmp_path / "store"),
            receivers_file=written(tmp_path, server.url),
        )
        with EmbeddedService(settings) as service:
            monkeypatch.setenv("WATCHSTEP_TOKEN", service.operator_token)
            asked = ["receivers", "test", "hook", "--service", service.url]
            answers = [CliRunner().invoke(app, asked), *_failing(server, asked)]
            unknown = CliRunner().invoke(app, [*asked[:2], "nobody", *asked[3:]])
    assert [answer.exit_code for answer in answers] == [0, 1]
    assert answers[0].output == "hook: done: 127.0.0.1: answered 204\n"
    assert "hook: failed: 127.0.0.1: answered 410" in answers[1].output
    assert "'nobody' of project default: not found" in str(unknown.exception)


def _failing(server: HttpServer, asked: list[str]) -> list[Result]:
    server.answers = [status(410)]
    return [CliRunner().invoke(app, asked)]


def test_the_schema_is_the_published_one() -> None:
    assert CliRunner().invoke(app, ["receivers", "schema"]).output == schema_text()
