from __future__ import annotations

from pathlib import Path

import pytest

from watchstep.errors import ConfigError
from watchstep_services.core.settings import load_settings


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
