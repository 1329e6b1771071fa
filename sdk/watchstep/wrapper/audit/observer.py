"""Observes an audited program from within: traces all operations from the import of PyTorch on, and stops it after some steps.

The trace begins at the import, so that the initialization of the model and the first pass of the data are in it. Modules are found when they are
called. A step ends with a step of the optimizer that was the first to step.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import random
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from watchstep.capture.steps.own_work import own_work
from watchstep.format.control import StopRequest
from watchstep.hook_arguments import AUDIT
from watchstep.pytorch import internals
from watchstep.pytorch.parameters import optimizer_steps
from watchstep.seeds import recorded_seeds
from watchstep.stopping import StopTraining
from watchstep.trace.operations import TraceMode
from watchstep.trace.trace_file import write_trace
from watchstep.trace.tracer import TraceConfig, Tracer
from watchstep.wrapper.audit.record import AUDIT_STEPS, LoaderReport, ProgramRecord, trace_path

_TRACE_BYTES = 2**30
_MAX_LOADERS = 20


def observe(variables: Mapping[str, str]) -> None:
    """Begin to observe this process, unless it is a worker process of Python's ``multiprocessing``.

    Args:
        variables: The environment, with `AUDIT` and `AUDIT_STEPS`.
    """
    if any(word.startswith("from multiprocessing") for word in sys.orig_argv[1:]):
        return
    rank = variables.get("RANK", "") or "0"
    _Observer(Path(variables[AUDIT]), int(variables[AUDIT_STEPS]), int(rank)).start()


class _Observer:
    """The observation of one rank."""

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        self._folder = folder
        self._limit = steps
        self._rank = rank
        self._process = os.getpid()
        self._thread = threading.get_ident()
        config = TraceConfig(
            TraceMode.STATISTICS, ring_steps=steps + 1, ring_bytes=_TRACE_BYTES, checksums=True
        )
        self._tracer = Tracer(config=config, finds_modules=True)
        self._open = ExitStack()
        self._mode: Any = None
        self._optimizer: Any = None
        self._begun = -1
        self._steps = 0
        self._generators: list[dict[str, str]] = []
        self._loaders: tuple[LoaderReport, ...] = ()
        self._notes: dict[str, None] = {}
        self._is_written = False

    def start(self) -> None:
        """Begin the first step."""
        self._generators.append(_generator_states())
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._finish)
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._open.enter_context(self._tracer.step(step))
        self._mode = internals.current_dispatch_mode.value()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._process or self._is_written:
            return
        self._optimizer = self._optimizer or optimizer
        begun = optimizer_steps.begun()
        # A class that inherits its step from another one calls this for both.
        if optimizer is not self._optimizer or begun == self._begun:
            return
        self._begun = begun
        own_work.depth += 1
        try:
            self._end_step()
        finally:
            own_work.depth -= 1
        if self._steps >= self._limit:
            self._finish()
            raise StopTraining(
                StopRequest("", self._steps - 1, "the audit has recorded its steps"), self._steps - 1
            )

    def _end_step(self) -> None:
        self._generators.append(_generator_states())
        if not self._steps:
            self._loaders = _loaders()
        self._steps += 1
        if self._steps >= self._limit:
            return
        if threading.get_ident() != self._thread or internals.current_dispatch_mode.value() is not self._mode:
            self._notes[
                "the program runs in a dispatch mode or thread of its own: its steps are one in the trace"
            ] = None
            return
        self._open.close()
        self._begin(self._steps)

    def _finish(self) -> None:
        """Write the report; at the end of the program if it ends by itself."""
        if os.getpid() != self._process or self._is_written:
            return
        self._is_written = True
        if not self._steps:  # a launcher, or another process that trains nothing
            return
        try:
            if (
                threading.get_ident() == self._thread
                and internals.current_dispatch_mode.value() is self._mode
            ):
                self._open.close()
            write_trace(self._tracer.trace(), trace_path(self._folder, self._rank))
            self._record().write(self._folder, self._rank)
        except Exception as error:  # noqa: BLE001 - never into the program
            sys.stderr.write(f"watchstep audit: not recorded: {error!r}\n")

    def _record(self) -> ProgramRecord:
        return ProgramRecord(
            self._steps,
            self._steps >= self._limit,
            tuple(self._generators),
            recorded_seeds(),
            _flags(),
            self._loaders,
            tuple(self._notes),
        )


def _generator_states() -> dict[str, str]:
    """Return digests of the states of all generators of the process. Draws nothing."""
    states = {"python": _digest(repr(random.getstate()).encode()), "torch": _digest_of(torch.get_rng_state())}
    if "numpy" in sys.modules:
        states["numpy"] = _digest(repr(_numpy_state()).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            states[f"cuda:{device}"] = _digest_of(torch.cuda.get_rng_state(device))
    return states


def _numpy_state() -> Any:
    state = sys.modules["numpy"].random.get_state(legacy=False)  # this module is loaded at its first use
    return [state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"], state["gauss"]]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _digest_of(state: torch.Tensor) -> str:
    return _digest(state.numpy().tobytes())


def _flags() -> dict[str, str]:
    return {
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        "threads": str(torch.get_num_threads()),
    }


def _loaders() -> tuple[LoaderReport, ...]:
    found = [each for each in gc.get_objects() if issubclass(type(each), DataLoader)]
    return tuple(
        LoaderReport(loader.num_workers, type(loader.sampler).__name__, loader.generator is not None)
        for loader in found[:_MAX_LOADERS]
    )
