"""Seeds of a program's random generators: `seed_all`, and what is recorded of it with the run.

Only modules that the program has imported are seeded at once. NumPy and PyTorch are seeded right after their import if the program imports them
later, before it can draw a number, so `seed_all` never imports a framework that the program does not use. Python's ``random`` is always seeded.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from watchstep.errors import ConfigError

if TYPE_CHECKING:
    import torch

_SEEDS = 2**32
"""NumPy's legacy generator takes seeds from 0 to below this number."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS is deterministic, by the documentation of `torch.use_deterministic_algorithms`; the first one is set."""

_NOT_SEEDED = "not seeded: "


@dataclass(frozen=True)
class SeedReport:
    """What `seed_all` did.

    Attributes:
        seed: the number that the program passed.
        rank: rank of this process, from ``RANK``; 0 without one.
        rank_offset: as passed.
        process_seed: the seed of this process's generators: ``seed + rank_offset * rank``.
        generators: generators that are seeded: ``python``, ``numpy``, ``torch`` (the CPU and all devices).
        later: modules that are not imported yet; they are seeded when the program imports them.
        deterministic: whether deterministic algorithms were requested.
        flags: name → value of the flags of PyTorch and CUDA that this set, or found.
        hash_seed: ``PYTHONHASHSEED`` of the process; ``random`` if it is not set, so that the order of sets of strings differs between processes.
        notes: what could not be made deterministic, and why.
    """

    seed: int
    rank: int
    rank_offset: int
    process_seed: int
    generators: tuple[str, ...]
    later: tuple[str, ...]
    deterministic: bool
    flags: dict[str, str] = field(default_factory=dict)
    hash_seed: str = "random"
    notes: tuple[str, ...] = ()

    def with_flags(self) -> SeedReport:
        """Return the report with the flags and notes of now, if deterministic algorithms were requested."""
        if not self.deterministic:
            return self
        unseeded = [note for note in self.notes if note.startswith(_NOT_SEEDED)]
        # PyTorch imports NumPy, so it may be imported in part.
        torch_module = sys.modules["torch"] if "torch" in self.generators else None
        return replace(self, flags=_flags(torch_module), notes=(*unseeded, *_notes(torch_module)))

    def with_seeded(self, name: str) -> SeedReport:
        """Return the report after a module that was imported later has been seeded."""
        later = tuple(other for other in self.later if other != name)
        return replace(self, generators=(*self.generators, name), later=later).with_flags()

    def with_unseeded(self, name: str, error: Exception) -> SeedReport:
        """Return the report after a module could not be seeded, as one of the program that has the name of a framework."""
        later = tuple(other for other in self.later if other != name)
        note = f"{_NOT_SEEDED}{name}: {type(error).__name__}: {error}"[:200]
        return replace(self, later=later, notes=(*self.notes, note)).with_flags()

    def as_data(self) -> dict[str, Any]:
        """Return a form that can be encoded as JSON."""
        return asdict(self)


def seed_all(seed: int, *, deterministic: bool = False, rank_offset: int = 0) -> SeedReport:
    """Seed the generators of Python, NumPy and PyTorch in this process. The recorder saves the result with the run.

    Call it first in the program, before the model is made. It can be called again; the last call counts.

    NumPy's generators of `numpy.random.default_rng`, generators of `torch.Generator` and keys of JAX have seeds of their own, which this cannot
    set. Workers of a ``DataLoader`` need nothing more: PyTorch seeds ``random``, NumPy and PyTorch in each worker from the generator of the
    loader, which by default draws from the one that is seeded here. `data_generator` makes the order of the data independent of it.

    Args:
        seed: from 0 to below 2**32.
        deterministic: also make PyTorch choose deterministic algorithms (`torch.use_deterministic_algorithms`, ``cudnn.deterministic``, no
            ``cudnn.benchmark``), and set ``CUBLAS_WORKSPACE_CONFIG``, unless it is set. Operations without a deterministic implementation then
            raise ``RuntimeError``.
        rank_offset: added to the seed once for each rank, so that ranks draw different numbers, e.g. for dropout. With the default 0 all
            ranks draw the same, which makes equal initial weights.

    Returns:
        What was seeded and set, and what could not be.

    Raises:
        ConfigError: the seed is not such a number, or becomes too large by the offset.
    """
    rank = _rank()
    process_seed = _checked(seed, rank_offset, rank)
    random.seed(process_seed)
    if deterministic:
        os.environ.setdefault(_WORKSPACE, _DETERMINISTIC_WORKSPACES[0])
    imported = tuple(name for name in _SEEDED if name in sys.modules)
    seeded: list[str] = []
    unseeded: list[tuple[str, Exception]] = []
    for name in imported:
        try:
            _SEEDED[name](sys.modules[name], process_seed, deterministic)
            seeded.append(name)
        except Exception as error:  # noqa: BLE001 - the program may run with such a module
            unseeded.append((name, error))
    report = SeedReport(
        seed,
        rank,
        rank_offset,
        process_seed,
        ("python", *seeded),
        tuple(name for name in _SEEDED if name not in imported),
        deterministic,
        hash_seed=hash_seed(),
    ).with_flags()
    for name, failure in unseeded:
        report = report.with_unseeded(name, failure)
    _reports[:] = [report]
    _seeder.wait_for(report.later)
    return report


def recorded_seeds() -> dict[str, Any]:
    """Return the data of the last `SeedReport` of this process, with modules that were seeded since; empty if `seed_all` was not called."""
    return _reports[-1].as_data() if _reports else {}


def data_generator(seed: int) -> torch.Generator:
    """Return a generator for ``DataLoader(generator=…)``. The order of the data and the seeds of its workers then depend on nothing else.

    Without it they change when the program draws one number more from PyTorch's generator, e.g. for another layer.

    Args:
        seed: from 0 to below 2**32.

    Raises:
        ConfigError: the seed is not such a number.
    """
    import torch

    return torch.Generator().manual_seed(_checked(seed, 0, 0))


def hash_seed() -> str:
    """Return the ``PYTHONHASHSEED`` that this process started with; ``random`` without one."""
    value = "" if sys.flags.ignore_environment else os.environ.get("PYTHONHASHSEED", "")
    if not sys.flags.hash_randomization:
        return "0"
    return value if value.isdecimal() and value != "0" else "random"


_reports: list[SeedReport] = []


def _rank() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _checked(seed: Any, rank_offset: Any, rank: int) -> int:
    hint = "use whole numbers, so that the seed of each rank is from 0 to below 2**32"
    for name, value in (("seed", seed), ("rank_offset", rank_offset)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"seed_all({name}={value!r})"[:200], hint)
    result: int = seed + rank_offset * rank
    if not (0 <= seed < _SEEDS and 0 <= result < _SEEDS):
        raise ConfigError(f"seed_all(seed={seed}, rank_offset={rank_offset}) in rank {rank}", hint)
    return result


def _seed_numpy(numpy: ModuleType, seed: int, _deterministic: bool) -> None:
    numpy.random.seed(seed)


def _seed_torch(torch: ModuleType, seed: int, deterministic: bool) -> None:
    torch.manual_seed(seed)  # also seeds all devices, those that start later included
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


_SEEDED: dict[str, Callable[[ModuleType, int, bool], None]] = {"numpy": _seed_numpy, "torch": _seed_torch}
"""Modules with a generator of the process → function that seeds it."""


def _flags(torch: ModuleType | None) -> dict[str, str]:
    flags = {_WORKSPACE: os.environ.get(_WORKSPACE, "")}
    if torch is not None:
        flags["torch.deterministic_algorithms"] = str(torch.are_deterministic_algorithms_enabled())
        flags["torch.backends.cudnn.deterministic"] = str(torch.backends.cudnn.deterministic)
        flags["torch.backends.cudnn.benchmark"] = str(torch.backends.cudnn.benchmark)
    return flags


def _notes(torch: ModuleType | None) -> list[str]:
    notes = []
    workspace = os.environ.get(_WORKSPACE, "")
    if workspace not in _DETERMINISTIC_WORKSPACES:
        notes.append(
            f"{_WORKSPACE}={workspace!r} was set before and stays: cuBLAS is deterministic with {' or '.join(_DETERMINISTIC_WORKSPACES)}"
        )
    if torch is not None and torch.cuda.is_initialized():
        notes.append(
            f"CUDA has started before seed_all: cuBLAS may have read {_WORKSPACE} already; call seed_all first, or set it before Python starts"
        )
    if hash_seed() == "random":
        notes.append(
            "PYTHONHASHSEED was not set before Python started: the order of sets of strings differs between processes"
        )
    return notes


class _AfterImport(MetaPathFinder):
    """Finds modules as usual, and seeds their generators right after their import."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._searching = threading.local()

    def wait_for(self, names: tuple[str, ...]) -> None:
        """Seed these modules when they are imported."""
        self._names = names
        if names and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not names and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the interface's
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        """Find a module that is to be seeded with the other finders."""
        if fullname not in self._names or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            self._seed_after(spec.loader, fullname)
        return spec

    def _seed_after(self, loader: Any, name: str) -> None:
        load = loader.exec_module

        def load_and_seed(module: ModuleType) -> None:
            load(module)
            if name in self._names:
                report = _reports[-1]
                self.wait_for(tuple(other for other in report.later if other != name))
                try:
                    _SEEDED[name](module, report.process_seed, report.deterministic)
                    report = report.with_seeded(name)
                except Exception as error:  # noqa: BLE001 - an import of the program goes on
                    report = report.with_unseeded(name, error)
                _reports[:] = [report]

        loader.exec_module = load_and_seed


_seeder = _AfterImport()
