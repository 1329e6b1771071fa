"""What is mirrored, and where: tools and series, from arguments, text or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from watchstep.errors import ConfigError
from watchstep.format.statistics import COUNT_COLUMNS, DERIVED, VALUE_COLUMNS
from watchstep.format.tensors import GRADIENTS, LOSSES, METRICS

Tool = Literal["wandb", "mlflow", "trackio", "tensorboard"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

DEFAULT_SERIES = (LOSSES, f"{GRADIENTS}/l2")
"""Series that are mirrored by default."""

_SCALARS = (LOSSES, METRICS)
_FIGURES = frozenset((*COUNT_COLUMNS, *VALUE_COLUMNS, *DERIVED))
_NEXT_TOOL = re.compile(rf",(?=\s*(?:{'|'.join(TOOLS)})\s*(?:[:,]|$))")
_ROWS = "rows"
_HINT = (
    'use "wandb", "wandb:rows", "mlflow", "trackio", "tensorboard:FOLDER", a SummaryWriter, or a list of them'
)


@dataclass(frozen=True)
class MirrorTarget:
    """One tool to mirror into.

    Attributes:
        tool: the tool.
        folder: for TensorBoard, the folder of the program's event files.
        has_own_rows: for W&B, whether each mirrored step is a row of its own.
    """

    tool: Tool
    folder: str = ""
    has_own_rows: bool = False

    @classmethod
    def parse(cls, text: str) -> MirrorTarget:
        """Read ``wandb``, ``wandb:rows``, ``mlflow``, ``trackio`` or ``tensorboard:FOLDER``.

        Raises:
            ConfigError: it is none of them.
        """
        name, _, detail = text.strip().partition(":")
        if name == "tensorboard":
            if not detail or "\0" in detail or re.match(r"[A-Za-z][\w+.-]*://", detail):
                raise ConfigError(
                    f"invalid mirror={text!r}"[:200],
                    "TensorBoard has no active run: name the folder of the program's event files, "
                    '"tensorboard:FOLDER", or pass its SummaryWriter',
                )
            return cls("tensorboard", detail)
        if name == "wandb" and detail in {"", _ROWS}:
            return cls("wandb", has_own_rows=detail == _ROWS)
        for tool in TOOLS:
            if text.strip() == tool:
                return cls(tool)
        raise ConfigError(f"invalid mirror={text!r}"[:200], _HINT)


@dataclass(frozen=True)
class Mirror:
    """The tools that a run is mirrored into, and the series.

    Attributes:
        tools: ``wandb``, ``wandb:rows``, ``mlflow``, ``trackio``, ``tensorboard:FOLDER``, a ``SummaryWriter``, or several of them.
        series: ``losses``; ``metrics``; and ``COLLECTION/FIGURE``, such as ``gradients/l2``: a figure over all tensors of a collection
            at a step. Figures are those of `watchstep.Run.series`, such as ``l2``, ``rms``, ``abs_max``, ``nan``.
    """

    tools: Any
    series: Sequence[str] = DEFAULT_SERIES

    def __post_init__(self) -> None:
        """Check the tools and the series. Raises `ConfigError`."""
        object.__setattr__(self, "tools", targets_of(self.tools))
        object.__setattr__(self, "series", _checked_series(self.series))

    @property
    def targets(self) -> tuple[MirrorTarget, ...]:
        """The tools."""
        targets: tuple[MirrorTarget, ...] = self.tools
        return targets


MIRROR = "WATCHSTEP_MIRROR"
"""Tools to mirror into, separated by commas."""

MIRROR_SERIES = "WATCHSTEP_MIRROR_SERIES"
"""Series to mirror, separated by commas."""


def mirror_of(given: Any) -> Mirror | None:
    """Return what to mirror from the argument, or else from the environment; None for nothing. Raises `ConfigError`."""
    if isinstance(given, Mirror):
        return given
    tools: Any = given
    if tools is None:
        tools = os.environ.get(MIRROR) or None
    if tools is None or tools in ([], ()):
        return None
    text = os.environ.get(MIRROR_SERIES, "")
    return Mirror(tools, [part.strip() for part in text.split(",")] if text else DEFAULT_SERIES)


def targets_of(given: Any) -> tuple[MirrorTarget, ...]:
    """Return the tools that an argument names. Raises `ConfigError`."""
    if isinstance(given, str):
        targets = [MirrorTarget.parse(part) for part in _NEXT_TOOL.split(given)]
    elif isinstance(given, MirrorTarget):
        targets = [given]
    elif (writer := _folder_of_writer(given)) is not None:
        targets = [MirrorTarget("tensorboard", writer)]
    elif isinstance(given, Iterable):
        targets = [target for entry in given for target in targets_of(entry)]
    else:
        raise ConfigError(f"invalid mirror={given!r}"[:200], _HINT)
    if not targets:
        raise ConfigError("mirror: no tool is named", _HINT)
    tools = [target.tool for target in targets]
    if repeated := {tool for tool in tools if tools.count(tool) > 1}:
        raise ConfigError(f"mirror: {', '.join(sorted(repeated))} is named twice", "name each tool once")
    return tuple(targets)


def _folder_of_writer(given: Any) -> str | None:
    """Return the folder of a ``SummaryWriter`` of PyTorch or tensorboardX; None for anything else."""
    folder = getattr(given, "log_dir", None) or getattr(given, "logdir", None)
    is_writer = hasattr(given, "add_scalar") and isinstance(folder, str | os.PathLike)
    return os.fspath(folder) if is_writer and folder else None


def _checked_series(series: Any) -> tuple[str, ...]:
    if isinstance(series, str) or not isinstance(series, Iterable):
        raise ConfigError(f"invalid series={series!r}"[:200], f"use a list such as {list(DEFAULT_SERIES)}")
    names = tuple(dict.fromkeys(series))
    for name in names:
        collection, _, figure = name.rpartition("/") if isinstance(name, str) else ("", "", "")
        if name not in _SCALARS and not (collection and figure in _FIGURES):
            raise ConfigError(
                f"invalid series {name!r}"[:200],
                f"use losses, metrics, or COLLECTION/FIGURE with one of {', '.join(sorted(_FIGURES))}",
            )
    return names
