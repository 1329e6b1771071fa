"""What every benchmark prints and writes: figures beside their targets, and on which machine they were measured."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Bound = Literal["at most", "at least"]

_PACKAGES = ("watchstep", "numpy", "pyarrow", "obstore", "safetensors", "torch")


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        value: as measured; None where it could not be, and the note says why.
        unit: "ratio", "s", "MiB", "$/h" and the like.
        target: what it shall be; None where it only informs.
        bound: on which side of the target it shall lie.
        note: spread, what limits it, or why it is missing.
    """

    value: float | None
    unit: str
    target: float | None = None
    bound: Bound = "at most"
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None where there is none. A missing value meets no target."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.target if self.bound == "at most" else self.value >= self.target

    def as_data(self) -> dict[str, Any]:
        """As it stands in the JSON file."""
        return {"value": self.value, "target": self.target, "unit": self.unit, "ok": self.ok}


@dataclass
class Report:
    """The figures of one benchmark, in the order they were added.

    Attributes:
        title: printed above the table.
        quick: whether this was a short run, whose figures are no evidence.
        packages: whose versions are told, beside those that every benchmark tells.
    """

    title: str
    quick: bool = False
    packages: Iterable[str] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, name: str, figure: Figure) -> None:
        """Take a figure.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.figures:
            raise ValueError(f"two figures are named {name}")
        self.figures[name] = figure

    def remark(self, text: str) -> None:
        """Say something about the whole run: rounds done, a peer that is not installed."""
        self.remarks.append(text)

    def as_data(self) -> dict[str, Any]:
        """As it is written: figures by name, machine, versions; notes and remarks in words."""
        return {
            "title": self.title,
            "quick": self.quick,
            "figures": {name: figure.as_data() for name, figure in self.figures.items()},
            "notes": {name: figure.note for name, figure in self.figures.items() if figure.note},
            "remarks": self.remarks,
            "machine": machine(),
            "versions": versions((*_PACKAGES, *self.packages)),
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file."""
        Path(path).write_text(json.dumps(self.as_data(), indent=2) + "\n")

    def show(self) -> None:
        """Print the table, and what there is to say."""
        console = Console(width=None if Console().is_terminal else 150, highlight=False)
        table = Table("figure", "value", "target", "unit", "", "note", title=self.title)
        for name, figure in self.figures.items():
            value = "missing" if figure.value is None else f"{figure.value:.4g}"
            sign = "≤" if figure.bound == "at most" else "≥"
            target = "" if figure.target is None else f"{sign} {figure.target:g}"
            mark = {None: "", True: "ok", False: "MISSED"}[figure.ok]
            table.add_row(name, value, target, figure.unit, mark, figure.note)
        console.print(table)
        for text in self.remarks:
            console.print(text, markup=False)
        if self.quick:
            console.print(
                "--quick: few rounds, so these figures show that the benchmark runs, and little more."
            )

    def finish(self, path: str | None) -> None:
        """Print, and write where a path was given."""
        self.show()
        if path:
            self.write(path)


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a minute's run: fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine and versions here")
    return parser


def machine() -> dict[str, Any]:
    """The machine's kind, never its name: CPU model, cores of this process, memory in GiB."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of packages; "not installed" where one is not."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
