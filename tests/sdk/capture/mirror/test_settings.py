"""What is mirrored, and where: arguments and variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from watchstep import Hook, Mirror
from watchstep.capture.mirror.settings import DEFAULT_SERIES, MirrorTarget, mirror_of
from watchstep.errors import ConfigError


def tools(given: Any) -> list[tuple[str, str]]:
    mirror = mirror_of(given)
    assert mirror is not None
    return [(target.tool, target.folder) for target in mirror.targets]


def test_tools_are_named_by_text_and_lists() -> None:
    assert tools("wandb") == [("wandb", "")]
    assert tools("wandb, tensorboard:a,b/c,mlflow") == [
        ("wandb", ""),
        ("tensorboard", "a,b/c"),
        ("mlflow", ""),
    ]
    assert tools(["trackio", "tensorboard:runs/a"]) == [("trackio", ""), ("tensorboard", "runs/a")]
    mirror = mirror_of("wandb:rows")
    assert mirror is not None
    assert mirror.targets == (MirrorTarget("wandb", has_own_rows=True),)
    assert mirror.series == DEFAULT_SERIES


def test_a_summary_writer_names_its_folder(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        assert tools(writer) == [("tensorboard", str(tmp_path))]
        assert tools(["mlflow", writer]) == [("mlflow", ""), ("tensorboard", str(tmp_path))]


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mirror_of(None) is None
    monkeypatch.setenv("WATCHSTEP_MIRROR", "mlflow,trackio")
    monkeypatch.setenv("WATCHSTEP_MIRROR_SERIES", "metrics, weights/rms")
    mirror = mirror_of(None)
    assert mirror is not None
    assert [target.tool for target in mirror.targets] == ["mlflow", "trackio"]
    assert mirror.series == ("metrics", "weights/rms")
    assert tools("wandb") == [("wandb", "")]
    given = Mirror("wandb", series=["losses"])
    assert mirror_of(given) is given
    assert mirror_of([]) is None


@pytest.mark.parametrize(
    "mirror",
    [
        "wandbb",
        "",
        "tensorboard",
        "tensorboard:",
        "tensorboard:s3://b/c",
        "mlflow:x",
        5,
        ["wandb", "wandb"],
        [3],
    ],
)
def test_what_names_no_tool_is_refused(tmp_path: Path, mirror: Any) -> None:
    with pytest.raises(ConfigError, match="mirror"):
        Hook(tmp_path / "store", mirror=mirror)
    assert not (tmp_path / "store").exists()


def test_an_invalid_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_MIRROR", "tensorboard")
    with pytest.raises(ConfigError, match="SummaryWriter"):
        Hook(tmp_path / "store")


@pytest.mark.parametrize("series", ["losses", ["loss"], ["gradients/l3"], ["/l2"], [5], 5])
def test_what_names_no_series_is_refused(series: Any) -> None:
    with pytest.raises(ConfigError, match="series"):
        Mirror("wandb", series=series)
