from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from watchstep_services.core.settings import load_settings
from watchstep_services.db.encryption import derived_keys, new_key


def test_keys_follow_from_the_services_keys_and_the_purpose(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    settings = load_settings(home=tmp_path, database_url=SecretStr("postgresql://u@h/d"))
    assert derived_keys(settings, "a") == ()
    (before,) = derived_keys(settings.model_copy(update={"secret_key": SecretStr(old)}), "a")
    both = settings.model_copy(update={"secret_key": SecretStr(f"{new}, {old}")})
    after, kept = derived_keys(both, "a")
    assert kept == before != after
    assert {len(key) for key in (before, after)} == {32}
    assert not set(derived_keys(both, "a")) & set(derived_keys(both, "b"))


def test_the_key_of_the_home_is_one_of_them(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path)
    (first,) = derived_keys(settings, "a")
    assert derived_keys(settings, "a") == (first,)
    assert (tmp_path / "secret.key").exists()
    assert derived_keys(load_settings(home=tmp_path / "none"), "a") == ()
