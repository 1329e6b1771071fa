"""Settings, the process's limit of open files, and links to pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import ConfigError
from watchstep_services.core.links import PageLinks
from watchstep_services.core.settings import load_settings

PROGRAM = """
import resource
from watchstep_services.core.process import most_connections, raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
print(most_connections())
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most_connections())
"""
NAME = st.text(min_size=1, max_size=20)


def test_defaults() -> None:
    settings = load_settings()
    assert (settings.port, settings.grace_seconds, settings.allowed_lateness_seconds) == (0, 30.0, 60.0)
    assert settings.resolved_database_url.startswith("sqlite:///")
    assert settings.listing_ns(local=True) < settings.listing_ns(local=False)


def test_environment_and_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATCHSTEP_STORE", "s3://bucket/runs")
    monkeypatch.setenv("WATCHSTEP_PORT", "8000")
    settings = load_settings(home=tmp_path, port=9000)
    assert (settings.store, settings.port, settings.home_folder) == ("s3://bucket/runs", 9000, tmp_path)


def test_a_bad_value_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_SWEEP_SECONDS", "often")
    with pytest.raises(ConfigError, match="WATCHSTEP_SWEEP_SECONDS = 'often'"):
        load_settings()


def test_the_soft_limit_becomes_the_hard_one_and_connections_leave_a_reserve() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["44", "2000", "1744"]


def test_the_addresses_of_the_page() -> None:
    links = PageLinks("https://watch.example/team")
    assert links.project("vision") == "https://watch.example/team/projects/vision"
    assert links.run("vision", "run-1") == "https://watch.example/team/projects/vision/runs/run-1"
    assert links.alert("a", "b", "c") == "https://watch.example/team/projects/a/runs/b/alerts/c"
    assert (
        links.picture("a", "b", "c") == "https://watch.example/team/v1/projects/a/runs/b/alerts/c/picture.png"
    )


def test_without_a_public_url_there_is_no_link() -> None:
    links = PageLinks("")
    assert {
        links.project("a"),
        links.run("a", "b"),
        links.alert("a", "b", "c"),
        links.picture("a", "b", "c"),
    } == {""}


@given(NAME, NAME, NAME)
def test_no_name_leaves_its_place(project: str, run: str, fingerprint: str) -> None:
    link = PageLinks("https://watch.example").alert(project, run, fingerprint)
    parts = urlsplit(link)
    assert (parts.netloc, parts.query, parts.fragment) == ("watch.example", "", "")
    assert [unquote(part) for part in parts.path.split("/")] == [
        "", "projects", project, "runs", run, "alerts", fingerprint,
    ]  # fmt: skip
