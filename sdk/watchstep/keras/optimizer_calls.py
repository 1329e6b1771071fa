"""Observation of Keras: updates of its optimizers, losses of batches, and results of evaluations.

`install` changes methods of Keras' own classes, once in a process: the class that owns ``_backend_apply_gradients``, the optimizer
that scales losses, and the trainer. It adds nothing to a model or an optimizer, so that what is saved is unchanged. An optimizer that
calls another one is observed once.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

import keras

from watchstep.keras.internals import keras_names, owner_of
from watchstep.stopping import StopTraining

_MARK = "_watchstep_observed"


@dataclass(frozen=True)
class OptimizerCall:
    """One update by an optimizer, in a trace or in eager code.

    Attributes:
        optimizer: the outermost optimizer.
        gradients: tensors of the backend, multiplied by ``scale``; None for one that does not exist.
        variables: Keras' variables, in the order of the gradients.
        scale: scale of the loss; None without dynamic loss scaling.
        is_finite: whether all gradients are finite; None unless the optimizer leaves out updates that are not.
    """

    optimizer: Any
    gradients: Sequence[Any]
    variables: Sequence[Any]
    scale: Any = None
    is_finite: Any = None


class KerasObserver(Protocol):
    """Receives what Keras does, on the thread that does it."""

    def updating(self, call: OptimizerCall) -> None:
        """An optimizer is about to update variables, or the update is being traced.

        Raises:
            StopTraining: a stop is due and the program opted in. The variables are not updated.
        """
        ...

    def computed(self, trainer: Any, loss: Any) -> None:
        """A trainer has computed the loss of a training batch, not multiplied by a scale."""
        ...

    def evaluated(self, results: Mapping[str, float]) -> None:
        """An evaluation has ended."""
        ...

    def begins(self, trainer: Any, *, is_inner: bool) -> None:
        """``fit`` begins.

        Args:
            trainer: the model.
            is_inner: whether another ``fit`` of this thread is in progress, whose callback may have called this one.
        """
        ...

    def ends(self, trainer: Any) -> None:
        """``fit`` ends, also by an exception."""
        ...

    def report(self, where: str, error: Exception) -> None:
        """Count a fault of the recorder."""
        ...


_observers: list[KerasObserver] = []


def _never() -> bool:
    return False


def _compiling() -> Callable[[], bool]:
    """Return the function that tells whether `torch.compile` traces the current code, which it replaces by a constant."""
    if keras.backend.backend() != "torch":
        return _never
    import torch

    return torch.compiler.is_compiling


_is_compiling: Callable[[], bool] = _compiling()


class _Depth(threading.local):
    """Calls in progress in this thread."""

    optimizers = 0
    evaluations = 0


_depth = _Depth()


def observe(observer: KerasObserver) -> None:
    """Pass what Keras does to an observer."""
    if observer not in _observers:
        _observers.append(observer)


def forget(observer: KerasObserver) -> None:
    """Pass nothing more to an observer."""
    if observer in _observers:
        _observers.remove(observer)


@functools.cache
def install() -> None:
    """Change Keras' methods. They call the original ones, and do nothing else as long as nothing is observed."""
    for key, observed in (
        ("apply", _applying),
        ("scaling_apply", _scaling_apply),
        ("scaling_stateless_apply", _scaling_stateless),
        ("compute_loss", _computing),
        ("compute_loss_inside", _computing),
        ("evaluate", _evaluating),
        ("fit", _fitting),
    ):
        owned = owner_of(key)
        if owned is not None:
            _replace(*owned, observed)


def _replace(owner: type, name: str, observed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = vars(owner)[name]
    if not hasattr(method, _MARK):
        replacement = functools.wraps(method)(observed(method))
        setattr(replacement, _MARK, True)
        setattr(owner, name, replacement)


@contextmanager
def _contained() -> Iterator[None]:
    """Contain the recorder's own faults; a stop is raised."""
    try:
        yield
    except StopTraining:
        raise
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
        for observer in tuple(_observers):
            observer.report("keras", error)


@contextmanager
def _observing(
    call: Callable[[], OptimizerCall | None], scope: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[None]:
    """Enclose an update. The outermost one is passed to the observers.

    Args:
        call: describes the update.
        scope: returns a context in which the variables have the values of the update; it is left before the update is made.
    """
    if _observers and not _depth.optimizers:
        with _contained(), scope():
            made = call()
            for observer in tuple(_observers) if made is not None else ():
                observer.updating(made)  # type: ignore[arg-type]
    _depth.optimizers += 1
    try:
        yield
    finally:
        _depth.optimizers -= 1


def _applying(method: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(optimizer: Any, grads: Any, trainable_variables: Any) -> Any:
        if _is_compiling():
            return method(optimizer, grads, trainable_variables)
        with _observing(lambda: OptimizerCall(optimizer, tuple(grads), tuple(trainable_variables))):
            return method(optimizer, grads, trainable_variables)

    return apply_gradients


def _scaling_apply(method: Callable[..., Any]) -> Callable[..., Any]:
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if _is_compiling():
            return method(optimizer, grads, trainable_variables)
        with _observing(lambda: _scaled_call(optimizer, grads, trainable_variables)):
            return method(optimizer, grads, trainable_variables)

    return apply


def _scaling_stateless(method: Callable[..., Any]) -> Callable[..., Any]:
    def stateless_apply(
        optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        def scope() -> AbstractContextManager[Any]:
            mapping = [
                *zip(optimizer.variables, optimizer_variables, strict=False),
                *zip(_variables_of(optimizer), trainable_variables, strict=False),
            ]
            scope: AbstractContextManager[Any] = keras.StatelessScope(state_mapping=mapping)
            return scope

        with _observing(lambda: _scaled_call(optimizer, grads, None), scope):
            return method(optimizer, optimizer_variables, grads, trainable_variables)

    return stateless_apply


def _scaled_call(optimizer: Any, grads: Any, variables: Any) -> OptimizerCall | None:
    """Describe an update by an optimizer that scales losses; None if it has no variables yet."""
    try:
        if not optimizer.built:
            optimizer.build(list(variables))
            optimizer.built = True
        chosen = _variables_of(optimizer) if variables is None else variables
        scale, is_finite = (keras_names.of(optimizer, key) for key in ("dynamic_scale", "check_finite"))
        if scale is None or is_finite is None or len(chosen) != len(grads):
            return None
        return OptimizerCall(
            optimizer,
            tuple(grads),
            tuple(chosen),
            scale=keras.ops.convert_to_tensor(scale),
            is_finite=is_finite(grads),
        )
    except Exception:  # noqa: BLE001 - the call itself raises it, or there is nothing to observe
        return None


def _variables_of(optimizer: Any) -> Any:
    return keras_names.of(optimizer, "trainable_variables", ())


def _computing(method: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        loss = method(trainer, *arguments, **keywords)
        if _is_compiling():
            return loss
        if _observers and (arguments[4] if len(arguments) > 4 else keywords.get("training", True)):
            with _contained():
                for observer in tuple(_observers):
                    observer.computed(trainer, loss)
        return loss

    return compute_loss


def _evaluating(method: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        _depth.evaluations += 1
        try:
            results = method(trainer, *arguments, **keywords)
        finally:
            _depth.evaluations -= 1
        if _observers and not _depth.evaluations:
            named = results if isinstance(results, dict) else _named(trainer, results)
            with _contained():
                for observer in tuple(_observers):
                    observer.evaluated(named)
        return results

    return evaluate


def _named(trainer: Any, results: Any) -> dict[str, float]:
    """Return the loss of results without names: Keras names only the first one reliably."""
    first = results[0] if isinstance(results, list) and results else results
    try:
        return {"loss": float(first)} if trainer.metrics_names[0] == "loss" else {}
    except Exception:  # noqa: BLE001 - of a trainer that overrides them
        return {}


_fits: set[CodeType] = set()
"""Code of Keras' own ``fit``."""


def fits_in_progress() -> int:
    """Return how many calls of ``fit`` this thread has in progress. Python may have looked up the first one before `install`."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to a caller's frame
    count = 0
    while frame is not None:
        count += frame.f_code in _fits
        frame = frame.f_back
    return count


def _fitting(method: Callable[..., Any]) -> Callable[..., Any]:
    _fits.add(inspect.unwrap(method).__code__)

    def fit(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        with _contained():
            for observer in tuple(_observers):
                observer.begins(trainer, is_inner=fits_in_progress() > 0)
        try:
            return method(trainer, *arguments, **keywords)
        finally:
            with _contained():
                for observer in tuple(_observers):
                    observer.ends(trainer)

    return fit
