"""What one rank of an audited program reports: the states of its random generators after each step, its seeds, flags and data loaders.

The program writes ``record-<rank>.json`` and ``trace-<rank>.zip`` into the folder of its run, which `watchstep.hook_arguments.AUDIT` names.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from watchstep.errors import FormatError
from watchstep.format.documents import OversizedJsonError, parse_json

AUDIT_STEPS = "WATCHSTEP_AUDIT_STEPS"
"""Number of steps after which an audited program is stopped."""

AUDIT_SEED = "WATCHSTEP_AUDIT_SEED"
"""Seed that an audited program gets at its start; not set if it is to seed itself."""

_MAX_BYTES = 8 * 2**20
_MAX_MEMORY = 128 * 2**20
_RECORD = re.compile(r"record-(\d{1,9})\.json")


@dataclass(frozen=True)
class LoaderReport:
    """A ``DataLoader`` of the program.

    Attributes:
        workers: number of worker processes.
        sampler: class of its sampler.
        has_generator: whether the program gave it a generator.
    """

    workers: int
    sampler: str
    has_generator: bool


@dataclass(frozen=True)
class ProgramRecord:
    """The report of one rank.

    Attributes:
        steps: number of finished steps.
        is_complete: whether it was stopped after the requested number of steps, and had not ended by itself before.
        generators: name → digest of the generator's state, at the import of PyTorch and after each step.
        seeds: data of the last `watchstep.SeedReport`; empty without one.
        flags: name → value of PyTorch's flags about deterministic algorithms.
        loaders: data loaders that existed after the first step.
        notes: what could not be observed.
    """

    steps: int
    is_complete: bool
    generators: tuple[dict[str, str], ...] = ()
    seeds: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    loaders: tuple[LoaderReport, ...] = ()
    notes: tuple[str, ...] = ()

    def write(self, folder: Path, rank: int) -> None:
        """Write the report."""
        (folder / f"record-{rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def trace_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's operation trace."""
    return folder / f"trace-{rank}.zip"


_ADAPTER = TypeAdapter(ProgramRecord)


def read_records(folder: Path) -> dict[int, ProgramRecord]:
    """Return the reports of a run by rank.

    Raises:
        FormatError: one is damaged or too large.
    """
    records = {}
    for path in sorted(folder.iterdir()):
        match = _RECORD.fullmatch(path.name)
        if match is None:
            continue
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise OversizedJsonError(f"more than {_MAX_BYTES} bytes")
            records[int(match[1])] = _ADAPTER.validate_python(parse_json(data, _MAX_MEMORY))
        except (OSError, ValueError, RecursionError, ValidationError) as error:
            raise FormatError(f"{path}: {str(error)[:200]}", "run the audit again") from error
    return records
