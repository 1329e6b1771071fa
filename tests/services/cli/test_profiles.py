"""Profiles: selection, precedence, and protection of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from watchstep.errors import ConfigError, ServiceError
from watchstep_services.cli import connection
from watchstep_services.cli.main import app
from watchstep_services.cli.profiles import active_profile, choose_profile

LAB = """\
default: lab
profiles:
  lab: {url: "https://lab.example/", project: vision, token_file: lab.token}
  own: {url: "http://127.0.0.1:8642"}
"""
STORE = connection.DEFAULT_STORE


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PROFILE", "PROJECT", "SERVICE", "STORE", "TOKEN", "HOME"):
        monkeypatch.delenv(f"WATCHSTEP_{name}", raising=False)
    file = tmp_path / "watchstep" / "profiles.yaml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file.parent.mkdir()
    write(file, LAB)
    write(file.parent / "lab.token", "wst_secret\n")
    choose_profile("")
    return file


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def test_the_default_of_the_file_is_used(file: Path) -> None:
    assert connection.service_of(STORE, "") == ("https://lab.example", "wst_secret")
    assert connection.split_run("night-1") == ("vision", "night-1")
    assert connection.split_run("audio/night-1") == ("audio", "night-1")


def test_the_environment_takes_precedence_over_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_PROFILE", "own")
    assert connection.service_of(STORE, "") == ("http://127.0.0.1:8642", "")
    assert connection.default_project() == "default"
    monkeypatch.setenv("WATCHSTEP_TOKEN", "of the environment")
    monkeypatch.setenv("WATCHSTEP_PROJECT", "audio")
    assert connection.service_of(STORE, "") == ("http://127.0.0.1:8642", "of the environment")
    assert connection.default_project() == "audio"


def test_an_option_takes_precedence_over_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_PROFILE", "own")
    done = CliRunner().invoke(app, ["--profile", "lab", "rules", "schema"])
    assert done.exit_code == 0
    profile = active_profile()
    assert profile is not None
    assert profile.name == "lab"


def test_a_named_service_or_store_takes_precedence_and_gets_no_token_of_a_profile(
    file: Path, tmp_path: Path
) -> None:
    assert connection.service_of(STORE, "http://other") == ("http://other", "")
    with pytest.raises(ServiceError, match="no service runs for"):
        connection.service_of(str(tmp_path / "runs"), "")


def test_without_a_file_there_is_no_profile(file: Path) -> None:
    file.unlink()
    assert active_profile() is None
    choose_profile("lab")
    with pytest.raises(ConfigError, match="no such file"):
        active_profile()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_token_that_others_can_read_is_refused(file: Path, mode: int) -> None:
    write(file.parent / "lab.token", "wst_secret", mode)
    with pytest.raises(ConfigError, match="other users may read it") as refused:
        active_profile()
    assert "chmod 600" in refused.value.hint
    write(file, "default: a\nprofiles: {a: {url: 'http://a', token: t}}", mode)
    with pytest.raises(ConfigError, match=r"other users may read it|others may write to it"):
        active_profile()


def test_a_file_that_others_can_write_to_is_refused(file: Path) -> None:
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write to it"):
        active_profile()


def test_a_link_to_a_token_is_refused(file: Path) -> None:
    (file.parent / "lab.token").rename(file.parent / "real")
    (file.parent / "lab.token").symlink_to("real")
    with pytest.raises(ConfigError, match="cannot be read"):
        active_profile()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("profiles: [", "not valid YAML"),
        ("- lab", "not a mapping"),
        ("default: lab", "no profile 'lab'"),
        ("default: lab\nprofiles: {own: {url: http://a}}", "no profile 'lab'"),
        ("default: 3", "default is not a string"),
        ("default: lab\nprofiles: {lab: {}}", "no url"),
        ("default: lab\nprofiles: {lab: {url: http://a, ulr: b}}", "unknown key 'ulr'"),
        (
            "default: lab\nprofiles: {lab: {url: http://a, token: a, token_file: b}}",
            "both token and token_file",
        ),
        ("default: lab\nprofiles: {lab: {url: http://a, token_file: none}}", "cannot be read"),
    ],
)
def test_problems_of_a_file_are_reported(file: Path, text: str, what: str) -> None:
    write(file, text)
    with pytest.raises(ConfigError, match=what):
        active_profile()
