"""Provenance: what an attempt records about its program, and that no secret is among it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from watchstep import Hook, open_run
from watchstep.capture.provenance import HIDDEN, provenance, without_secrets

HEX = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("--lr 0.1 --tokenizer gpt2 --monkey 3", "--lr 0.1 --tokenizer gpt2 --monkey 3"),
        ("--api-key abc --lr 1", f"--api-key {HIDDEN} --lr 1"),
        ("--hf_token=abc", f"--hf_token={HIDDEN}"),
        ("--apiKey abc", f"--apiKey {HIDDEN}"),
        ("--token --lr 1", "--token --lr 1"),
        ("wandb.password=abc model.depth=3", f"wandb.password={HIDDEN} model.depth=3"),
        ("--data s3://user:pass@host/data", f"--data s3://{HIDDEN}@host/data"),
        ("x AKIAABCDEFGHIJKLMNOP", f"x {HIDDEN}"),
        ("ghp_abcdefghijklmnopqrst sk-proj-abcdefghijklmnopqrst", f"{HIDDEN} {HIDDEN}"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.abc", HIDDEN),
        (f"--id {HEX}", f"--id {HIDDEN}"),
        ("Zx9Zx9Zx9Zx9Zx9Zx9Zx9Zx9Zx9", HIDDEN),
        ("data/train-2026-11-29/part-00001-of-00128.parquet", "data/train-2026-11-29/part-00001-of-00128.parquet"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_by_name_and_by_shape(arguments: str, kept: str) -> None:
    assert without_secrets(arguments.split(" ")) == kept.replace(HIDDEN, "\0").replace(" ", "\n").replace(
        "\0", HIDDEN
    ).split("\n")


def test_the_commit_and_uncommitted_changes_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    (tmp_path / "train.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.chdir(tmp_path)
    found = provenance()
    assert (found["commit"], found["uncommitted changes"]) == (git("rev-parse", "HEAD").strip(), "none")
    (tmp_path / "train.py").write_text("2")
    assert provenance()["uncommitted changes"] == "1 file"


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_token={HEX}")
    monkeypatch.setenv("MY_PASSWORD", "abc")
    found = provenance()
    assert found["variable CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "abc" not in found.values()
    assert HEX not in str(found)


def test_a_run_has_the_provenance_of_its_newest_attempt(tmp_path: Path) -> None:
    with Hook(tmp_path, run="r") as hook:
        hook.log(loss=1.0)
        hook.step()
    found = open_run(hook.run_url).environment()
    assert found["program digest"] == hashlib.sha256(Path(sys.argv[0]).read_bytes()).hexdigest()[:16]
    assert found["package torch"]
    assert {"command", "folder", "python", "host", "platform"} <= found.keys()
