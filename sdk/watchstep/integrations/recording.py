"""Common parts of the framework integrations: ranks, a hook for each training, stops, and errors for missing libraries."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from watchstep.capture.identity import ATTEMPT, RUN, new_nonce
from watchstep.errors import ConfigError
from watchstep.format.control import StopRequest
from watchstep.format.tensors import Mode
from watchstep.hook import Hook
from watchstep.hook_arguments import on_stop_from_environment
from watchstep.stopping import Noted, StopTraining


@dataclass(frozen=True)
class Ranks:
    """One rank of several.

    Attributes:
        rank: from 0.
        world_size: number of ranks, at least 2.
        local_rank: rank on this machine, from 0.
        local_size: number of ranks on this machine; 0 if unknown.
        broadcast: sends rank 0's value to every rank; a collective.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    broadcast: Callable[[tuple[str, str]], tuple[str, str]]

    def agreed(self, run: str | None) -> tuple[str, str]:
        """Return the run and the attempt of all ranks, as chosen by rank 0. Call it on every rank, or on none.

        Args:
            run: the run that this rank requests.
        """
        attempt = os.environ.get(ATTEMPT) or new_nonce()
        return self.broadcast((run or os.environ.get(RUN) or f"run-{attempt}", attempt))

    @contextmanager
    def environment(self, attempt: str) -> Iterator[None]:
        """Set the environment variables that a launcher would have set, within the block."""
        ranks = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            ATTEMPT: attempt,
        }
        if self.local_size:
            ranks["LOCAL_WORLD_SIZE"] = str(self.local_size)
        before = {name: os.environ.get(name) for name in ranks}
        os.environ.update(ranks)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def opened(ranks: Ranks | None, run: str | None, options: Mapping[str, Any]) -> Hook:
    """Create a hook for this rank; all ranks record one run and attempt. A collective if there are several ranks.

    Args:
        ranks: this rank; None if there is only one.
        run: the run's id, if it is set; with several ranks, rank 0's counts.
        options: further arguments of `Hook`.

    Raises:
        ConfigError: an argument or variable is invalid.
    """
    if ranks is None:
        return Hook(run=run, **options)
    agreed, attempt = ranks.agreed(run)
    with ranks.environment(attempt):
        return Hook(run=agreed, **options)


def missing(library: str, extra: str, error: ImportError) -> NoReturn:
    """Report the extra that installs a missing library.

    Raises:
        ImportError: always.
    """
    raise ImportError(
        f"{library} is not installed, or cannot be imported ({error})\n  hint: pip install 'watchstep[{extra}]'"
    ) from error


OnStop = Literal["ignore", "stop", "checkpoint", "raise"]
"""Effect of a stop on a framework's trainer: none; its own early stop; the same after a checkpoint; `StopTraining`."""

_log = logging.getLogger("watchstep")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_OPTIONS = frozenset(inspect.signature(Hook.__init__).parameters) - {
    "self",
    "store_url",
    "on_stop",
    "first_step",
}


class CallbackRecording:
    """The hook of a callback: a new one for each training, or the program's own for all of them.

    Attributes:
        hook: the hook of the current or the last training; None before the first.
        requested: a stop that has taken effect, for the callback to carry out.
        on_stop: the effect of a stop.
        ends_program: whether the program ends after its trainer has stopped, because its launcher requests a checkpoint.
    """

    def __init__(
        self,
        store_url: str | os.PathLike[str] | None,
        hook: Hook | None,
        on_stop: OnStop | None,
        options: Mapping[str, Any],
    ) -> None:
        """Create the recording without starting it.

        Raises:
            ConfigError: an argument is invalid, or the program's own hook is combined with arguments for a new one.
        """
        check_options(options)
        if hook is not None and (store_url is not None or on_stop is not None or options):
            raise ConfigError("hook= cannot be combined with other arguments", "pass them to the Hook")
        self.hook = hook
        self.requested: StopRequest | None = None
        self.ends_program = on_stop is None and on_stop_from_environment() == "checkpoint"
        self.on_stop = _checked(on_stop)
        self._own = hook is None
        self._store_url = store_url
        self._options = dict(options)
        self._trainings = 0
        self._first_run = ""
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, first_step: int = 0, ranks: Ranks | None = None) -> Hook:
        """Begin a training. A collective if there are several ranks, unless the hook is the program's own.

        The first training records the run that the program or the environment names. One that resumes from a checkpoint is
        another attempt of the previous run; any other is a separate run, ``NAME-2`` and so on.

        Args:
            first_step: the number of its first step.
            ranks: this rank, if there are several.

        Raises:
            ConfigError: an argument or variable is invalid.
        """
        self.requested = None
        if not self._own:
            assert self.hook is not None
            return self.hook
        self.end()  # ends a training that raised an exception
        self._trainings += 1
        on_stop = Noted(self._request_stop) if self.on_stop in {"stop", "checkpoint"} else self.on_stop
        run = self._run(first_step)
        options = {name: value for name, value in self._options.items() if name != "run"}
        options |= {"store_url": self._store_url, "on_stop": on_stop, "first_step": first_step}
        self.hook = opened(ranks, run, options)
        self._first_run = self._first_run or self.hook.run
        self._watched.clear()
        return self.hook

    def watch(
        self,
        model: Any,
        optimizer: Any,
        *,
        replicated: bool = False,
        sum_losses: bool = False,
        loss_divisor: float | Callable[[], float] = 1.0,
    ) -> None:
        """Watch a model like `Hook.watch`, once per hook.

        Raises:
            ConfigError: the model cannot be watched.
        """
        if self.hook is not None and model not in self._watched:
            self.hook.watch(
                model,
                optimizer,
                replicated=replicated,
                sum_losses=sum_losses,
                loss_divisor=loss_divisor,
            )
            self._watched.add(model)

    def count_by_hand(self) -> None:
        """Let only `Hook.step` count steps."""
        if self.hook is not None:
            for watch in self.hook._watches:  # noqa: SLF001 - part of the same package
                watch.counts_steps = False

    def log(self, values: Mapping[str, Any], mode: Mode = "train") -> None:
        """Record the numbers among values at the current step."""
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        if self.hook is not None and numbers:
            self.hook.log(numbers, mode=mode)

    def end(self, error: BaseException | None = None) -> None:
        """End a training; the program's own hook stays open."""
        if self.hook is not None and self._own:
            self.hook.__exit__(None if error is None else type(error), error, None)

    def end_program(self) -> None:
        """End the program after the trainer has stopped, if its launcher requests that.

        Raises:
            StopTraining: the training was stopped, and the launcher requests the end of the program.
        """
        if self.ends_program and self.hook is not None and self.requested is not None:
            raise StopTraining(self.requested, self.hook._recorder.step)  # noqa: SLF001 - as above

    def saved(self, path: str | os.PathLike[str]) -> None:
        """Report a checkpoint that the trainer has saved after the last finished step."""
        if self.hook is not None:
            self.hook.checkpoint_saved(path)

    def protected(self) -> frozenset[str]:
        """Checkpoints that the trainer must not delete."""
        return frozenset() if self.hook is None else self.hook.protected_checkpoints()

    def fault(self, where: str, error: Exception) -> None:
        """Count a fault of the callback, or log it if nothing records."""
        if self.hook is not None:
            self.hook._health.fault(where, error)  # noqa: SLF001 - as above
        else:
            _log.warning("watchstep: %s: %s: %s; nothing is recorded", where, type(error).__name__, error)

    def _request_stop(self, request: StopRequest) -> None:
        self.requested = request

    def _run(self, first_step: int) -> str | None:
        if self._trainings == 1:
            run: str | None = self._options.get("run")
            return run
        assert self.hook is not None
        return self.hook.run if first_step > 0 else f"{self._first_run}-{self._trainings}"


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a hook before anything begins.

    Raises:
        ConfigError: an option is not an argument of `Hook`.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        raise ConfigError(f"unknown argument {', '.join(unknown)}", f"use {', '.join(sorted(_OPTIONS))}")


def contained_faults(method: _Method) -> _Method:
    """Contain a callback's own faults; `StopTraining` and `ConfigError` are raised."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (StopTraining, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._recording.fault(method.__name__, error)
            return None

    return call  # type: ignore[return-value]


def _checked(on_stop: OnStop | None) -> OnStop:
    if on_stop is None:  # from the launcher; a trainer's early stop is better than an exception
        effects: dict[str, OnStop] = {"raise": "stop", "stop": "stop", "checkpoint": "checkpoint"}
        return effects.get(on_stop_from_environment(), "ignore")
    if on_stop not in {"ignore", "stop", "checkpoint", "raise"}:
        raise ConfigError(f"invalid on_stop={on_stop!r}", 'use "ignore", "stop", "checkpoint" or "raise"')
    return on_stop


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor or array of one element."""
    if isinstance(value, bool | int | float):
        return True
    try:
        return bool(value.numel() == 1) if hasattr(value, "numel") else bool(value.size == 1)
    except (AttributeError, TypeError):
        return False
