"""What the framework integrations share: the rank, a hook for each training, its stop, and errors for missing libraries."""

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
    """One rank among several.

    Attributes:
        rank: from 0.
        world_size: how many there are, at least 2.
        local_rank: among those of this machine, from 0.
        local_size: how many there are on this machine; 0 where nobody says.
        broadcast: gives every rank what rank 0 has; a collective.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    broadcast: Callable[[tuple[str, str]], tuple[str, str]]

    def agreed(self, run: str | None) -> tuple[str, str]:
        """The run and the attempt that all ranks record, by rank 0. Call it on every rank, or none.

        Args:
            run: as this rank would have it.
        """
        attempt = os.environ.get(ATTEMPT) or new_nonce()
        return self.broadcast((run or os.environ.get(RUN) or f"run-{attempt}", attempt))

    @contextmanager
    def told(self, attempt: str) -> Iterator[None]:
        """Within this the environment says what a launcher would have said."""
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
    """A hook for this rank; of several ranks all record one run and attempt. On several ranks a collective.

    Args:
        ranks: None where there is one.
        run: its run, if it is named; of several ranks rank 0's counts.
        options: the rest of what `Hook` takes, by name.

    Raises:
        ConfigError: an argument or variable is wrong.
    """
    if ranks is None:
        return Hook(run=run, **options)
    agreed, attempt = ranks.agreed(run)
    with ranks.told(attempt):
        return Hook(run=agreed, **options)


def missing(library: str, extra: str, error: ImportError) -> NoReturn:
    """Say which extra brings a library.

    Raises:
        ImportError: always.
    """
    raise ImportError(
        f"{library} is not installed, or cannot be imported ({error})\n  hint: pip install 'watchstep[{extra}]'"
    ) from error


OnStop = Literal["ignore", "stop", "checkpoint", "raise"]
"""What a stop does to a framework's trainer: nothing; its own way to stop early; the same after a checkpoint; `StopTraining`."""

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
        hook: of the training that is under way, or of the last one; None before the first.
        asked: the stop that the training has come to, where the callback is to carry it out.
        on_stop: what it does.
        ends_program: whether the program ends when its trainer has stopped: its launcher asks for that, with a checkpoint.
    """

    def __init__(
        self,
        store_url: str | os.PathLike[str] | None,
        hook: Hook | None,
        on_stop: OnStop | None,
        options: Mapping[str, Any],
    ) -> None:
        """Nothing is recorded yet.

        Raises:
            ConfigError: an argument is wrong, or the program's own hook is given together with how to make one.
        """
        check_options(options)
        if hook is not None and (store_url is not None or on_stop is not None or options):
            raise ConfigError("hook= beside other arguments", "give them to the Hook that you make")
        self.hook = hook
        self.asked: StopRequest | None = None
        self.ends_program = on_stop is None and on_stop_from_environment() == "checkpoint"
        self.on_stop = _checked(on_stop)
        self._own = hook is None
        self._store_url = store_url
        self._options = dict(options)
        self._trainings = 0
        self._first_run = ""
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, first_step: int = 0, ranks: Ranks | None = None) -> Hook:
        """A training begins. On several ranks a collective, where the hook is not the program's own.

        The first training records the run that the program or the environment names. One that goes on from a checkpoint is
        another attempt of the run before it; any other is a run of its own, ``NAME-2`` and so on.

        Args:
            first_step: the number of its first step.
            ranks: where there are several.

        Raises:
            ConfigError: an argument or variable is wrong.
        """
        self.asked = None
        if not self._own:
            assert self.hook is not None
            return self.hook
        self.end()  # of a training that an exception ended
        self._trainings += 1
        on_stop = Noted(self._ask) if self.on_stop in {"stop", "checkpoint"} else self.on_stop
        named = self._run(first_step)
        options = {name: value for name, value in self._options.items() if name != "run"}
        options |= {"store_url": self._store_url, "on_stop": on_stop, "first_step": first_step}
        self.hook = opened(ranks, named, options)
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
        """Watch a model as `Hook.watch` does, once with each hook.

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
        """From the first step on only `Hook.step` counts."""
        if self.hook is not None:
            for watch in self.hook._watches:  # noqa: SLF001 - the callbacks are parts of the recorder
                watch.counts_steps = False

    def log(self, values: Mapping[str, Any], mode: Mode = "train") -> None:
        """Record what are numbers among values, at the current step."""
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        if self.hook is not None and numbers:
            self.hook.log(numbers, mode=mode)

    def end(self, error: BaseException | None = None) -> None:
        """A training is over; the program's own hook stays open."""
        if self.hook is not None and self._own:
            self.hook.__exit__(None if error is None else type(error), error, None)

    def end_program(self) -> None:
        """The trainer has stopped, and done all that it does then.

        Raises:
            StopTraining: it was stopped, and the launcher wants the program to end.
        """
        if self.ends_program and self.hook is not None and self.asked is not None:
            raise StopTraining(self.asked, self.hook._recorder.step)  # noqa: SLF001 - as above

    def saved(self, path: str | os.PathLike[str]) -> None:
        """The trainer has saved a checkpoint, after the last step that is finished."""
        if self.hook is not None:
            self.hook.checkpoint_saved(path)

    def protected(self) -> frozenset[str]:
        """Checkpoints that the trainer must not delete."""
        return frozenset() if self.hook is None else self.hook.protected_checkpoints()

    def fault(self, where: str, error: Exception) -> None:
        """Something of the callback went wrong: count it, or log it where nothing records."""
        if self.hook is not None:
            self.hook._health.fault(where, error)  # noqa: SLF001 - as above
        else:
            _log.warning("watchstep: %s: %s: %s; nothing is recorded", where, type(error).__name__, error)

    def _ask(self, request: StopRequest) -> None:
        self.asked = request

    def _run(self, first_step: int) -> str | None:
        if self._trainings == 1:
            named: str | None = self._options.get("run")
            return named
        assert self.hook is not None
        return self.hook.run if first_step > 0 else f"{self._first_run}-{self._trainings}"


def check_options(options: Mapping[str, Any]) -> None:
    """See that a hook will take what it is given, before anything begins.

    Raises:
        ConfigError: one is none of its arguments.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        raise ConfigError(f"{', '.join(unknown)}: no such argument", f"use {', '.join(sorted(_OPTIONS))}")


def contained_faults(method: _Method) -> _Method:
    """Keep a callback's own faults out of training; `StopTraining` and wrong arguments pass."""

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
    if on_stop is None:  # what a launcher says; a trainer has a better way to stop than an exception
        ways: dict[str, OnStop] = {"raise": "stop", "stop": "stop", "checkpoint": "checkpoint"}
        return ways.get(on_stop_from_environment(), "ignore")
    if on_stop not in {"ignore", "stop", "checkpoint", "raise"}:
        raise ConfigError(f"on_stop={on_stop!r}", 'use "ignore", "stop", "checkpoint" or "raise"')
    return on_stop


def _is_number(value: Any) -> bool:
    """Whether it is a number, or a tensor or array of one element."""
    if isinstance(value, bool | int | float):
        return True
    try:
        return bool(value.numel() == 1) if hasattr(value, "numel") else bool(value.size == 1)
    except (AttributeError, TypeError):
        return False
