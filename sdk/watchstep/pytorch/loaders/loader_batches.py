"""Batches of data loaders: one observation of `torch.utils.data.DataLoader` per process, which notifies listeners.

A batch is reported when a data loader yields it, with the ids of its samples. With worker processes, which load several batches ahead,
the ids are those that the sampler gave for this batch: PyTorch numbers the requests to its workers, and the number of the batch that
is yielded identifies its request, also if ``in_order=False`` yields batches in the order of their arrival.

Three methods of PyTorch's iterators are replaced while a listener exists:

- ``_next_index`` of all iterators: notes the ids that the sampler gives, with the number of the request
- ``_process_data`` of the iterator with worker processes: determines the request of the batch that is about to be yielded
- ``__next__`` of all iterators: notifies

The data loaders of Hugging Face Accelerate, which the Transformers trainer uses as well, fetch one batch ahead. Their batches are
reported when they pass them on.

An iteration that began before the first listener is reported without its data loader, and without the ids of samples that were
requested from workers before. Forked children, such as workers, do not notify.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from watchstep.pytorch import internals

_LOOKS_AHEAD = ("accelerate.data_loader", "__iter__")
"""Module and name of the generators of Accelerate that fetch a batch before they yield the previous one."""

_STATE = "_watchstep_iteration"
"""Attribute of an iterator of PyTorch."""

_MAX_REQUESTS = 4096
"""Requests whose ids are remembered. More are outstanding only with very many workers."""

_MAX_COPIED = 2**20
"""Samples of a batch whose ids are reported."""

_MAX_NESTED = 16
"""Subsets of subsets that are resolved."""


class BatchListener(Protocol):
    """Receives every batch that a data loader yields in this process."""

    def batch_yielded(
        self,
        loader: DataLoader[Any] | None,
        batch: Any,
        sample_ids: Sequence[Any] | None,
        epoch: int,
        number: int,
    ) -> None:
        """Handle a batch that the program is about to receive, on the thread that iterates.

        A listener keeps at most a weak reference to the data loader. A data loader with persistent workers that is collected by Python's
        garbage collector, and not by the end of its last reference, waits five seconds for each worker.

        Args:
            loader: The data loader; None if its iteration began before the first listener, or if it has persistent workers and no
                longer exists.
            batch: The batch, as the program receives it. Accelerate may move it to a device afterwards.
            sample_ids: Of a map-style dataset: what the sampler gave, which are indices unless the program has its own sampler; those of
                a `torch.utils.data.Subset` are replaced by the indices in the dataset below it. Of an iterable dataset: one
                dictionary ``{"loader_worker", "epoch", "batch"}`` with the number of the worker process, the epoch, and the number of the
                batch among this worker's of the epoch, from 0. None if unknown.
            epoch: Number of earlier iterations of the data loader, or the epoch of its sampler if that is larger, as after
                `DistributedSampler.set_epoch` of a training that resumes. From 0.
            number: Number of the batch in the epoch, from 0.
        """
        ...

    def failed(self, error: Exception) -> None:
        """Handle a failure of the observation."""
        ...


class _Iteration:
    """State of one iterator: what was requested, and what is about to be yielded."""

    __slots__ = ("_counts", "ahead", "epoch", "loader", "requests", "skipped", "worker", "yielding")

    def __init__(self, loader: DataLoader[Any] | None) -> None:
        self.loader = _reference_to(loader)
        self.requests: dict[int, Any] = {}
        self.yielding: Any = None
        self.worker = 0
        self.epoch = -1
        self.ahead: tuple[Any, Sequence[Any] | None, int, int] | None = None
        """A batch that Accelerate has fetched and not passed on: the batch, its ids, epoch and number."""
        self.skipped = 0
        """Number of batches at the start of an epoch that Accelerate does not pass on."""
        self._counts: dict[int, int] = {}

    def begin_epoch(self, iterator: Any) -> None:
        """Handle the first batch of an epoch. Persistent workers have one iterator for all epochs."""
        self._counts.clear()
        loader = self.loader()
        self.epoch = _epoch_of(iterator, loader)

    def next_of_worker(self) -> int:
        """Count a batch of the current worker, and return the number of earlier ones in the epoch."""
        number = self._counts.get(self.worker, 0)
        self._counts[self.worker] = number + 1
        return number


class RepeatedBatch(NamedTuple):
    """A batch that a data loader yields again.

    Attributes:
        batch: The batch.
        prepare: Called before.
    """

    batch: Any
    prepare: Callable[[], None]


_listeners: list[weakref.ref[BatchListener]] = []
_repeated: dict[int | None, deque[RepeatedBatch]] = {}
"""Batches that data loaders yield before others, by the id of the loader; None for any loader."""
# Of this kind, because comparing data loaders may run methods of the program.
_epochs: MutableMapping[DataLoader[Any], int] = internals.weak_id_dictionary.value()
_originals: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
_at_fork: list[bool] = []


def listen(listener: BatchListener) -> None:
    """Register a listener. Only a weak reference to it is kept; PyTorch's methods are restored after the last one."""
    if not _at_fork:
        os.register_at_fork(after_in_child=_stop)
        _at_fork.append(True)
    _listeners.append(weakref.ref(listener, _gone))
    iterator, workers = internals.loader_iterator.value, internals.workers_iterator.value
    _replace(iterator, "__init__", _observing_init)
    if not internals.loader_next_index.is_missing:
        _replace(iterator, internals.loader_next_index.name, _observing_next_index)
    if not internals.loader_process_data.is_missing:
        _replace(workers, internals.loader_process_data.name, _observing_process_data)
    _replace(iterator, "__next__", _observing_next)


def forget(listener: BatchListener) -> None:
    """Unregister a listener."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]
    _restore_unused()


def yield_again(batches: Mapping[int | None, deque[RepeatedBatch]]) -> None:
    """Let data loaders yield batches before they fetch others, in place of those that were given by an earlier call. Needs a listener.

    Args:
        batches: By the id of the data loader. Those under None are yielded by the data loader that is iterated next.
    """
    _repeated.clear()
    _repeated.update(batches)


def yields_again() -> bool:
    """Return whether batches of `yield_again` have not been fetched yet."""
    return any(_repeated.values())


def underlying_ids(dataset: Any, sample_ids: Sequence[Any]) -> Sequence[Any]:
    """Return the indices in the dataset below a `Subset`, also of subsets of subsets; other ids unchanged.

    Args:
        dataset: The dataset of a data loader.
        sample_ids: Indices in it.
    """
    for _ in range(_MAX_NESTED):
        if type(dataset) is not Subset:  # a subclass may choose samples in another way
            break
        indices = dataset.indices
        sample_ids = [indices[index] for index in sample_ids]
        dataset = dataset.dataset
    return sample_ids


def _gone(_reference: weakref.ref[BatchListener]) -> None:
    _listeners[:] = [reference for reference in _listeners if reference() is not None]
    _restore_unused()


def _stop() -> None:
    """Stop in a forked child: the run belongs to its parent."""
    _listeners.clear()
    _restore_unused()


def _restore_unused() -> None:
    """Restore PyTorch's methods without a listener. A method that somebody else has replaced since remains, and only calls the original."""
    if _listeners:
        return
    for (owner, name), (original, own) in list(_originals.items()):
        if owner.__dict__.get(name) is own:
            setattr(owner, name, original)
            del _originals[owner, name]


def _replace(
    owner: type | None, name: str, observing: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    if owner is None or (owner, name) in _originals:
        return  # a version of PyTorch without this class; or replaced already, perhaps below a program's replacement
    original = owner.__dict__.get(name)
    if original is None:
        return
    own = observing(original)
    _originals[owner, name] = (original, own)
    setattr(owner, name, own)


def _report(error: Exception) -> None:
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.failed(error)


def _observing_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if _listeners:
            try:
                setattr(self, _STATE, _Iteration(loader))
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
                _report(error)
        original(self, loader, *args, **kwargs)

    return init


def _observing_next_index(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def next_index(self: Any) -> Any:
        index = original(self)
        if _listeners:
            try:
                _note_request(self, index)
            except Exception as error:  # noqa: BLE001 - as above
                _report(error)
        return index

    return next_index


def _observing_process_data(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_data(self: Any, *args: Any) -> Any:
        if _listeners:
            try:
                _note_arrival(self, args)
            except Exception as error:  # noqa: BLE001 - as above
                _report(error)
        return original(self, *args)

    return process_data


def _observing_next(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        if _repeated and (repeated := _next_repeated(self)) is not None:
            repeated.prepare()
            _yielded_again(self, repeated.batch, sys._getframe(1))  # noqa: SLF001 - the documented way to a caller's frame
            return repeated.batch
        try:
            batch = original(self)
        except StopIteration:
            if _listeners and (state := getattr(self, _STATE, None)) is not None:
                _pass_on(state)
            raise
        if _listeners:
            try:
                _yielded(self, batch, sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
            except Exception as error:  # noqa: BLE001 - as above
                _report(error)
        return batch

    return next_batch


def _next_repeated(iterator: Any) -> RepeatedBatch | None:
    """Remove and return the batch that an iterator yields again; None for none."""
    state: _Iteration | None = getattr(iterator, _STATE, None)
    loader = None if state is None else state.loader()
    waiting = _repeated.get(id(loader)) or _repeated.get(None)
    return waiting.popleft() if waiting else None


def _yielded_again(iterator: Any, batch: Any, caller: FrameType) -> None:
    """Report a batch that is yielded again, without the ids of its samples. Its number is that of the last one."""
    try:
        state = _state_of(iterator)
        number = max(0, (internals.loader_num_yielded.of(iterator) or 1) - 1)
        if _fetches_ahead(caller):
            _pass_on(state)
            state.ahead = (batch, None, state.epoch, number)
        else:
            _notify(state.loader(), batch, None, state.epoch, number)
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
        _report(error)


def _fetches_ahead(caller: FrameType) -> bool:
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) == _LOOKS_AHEAD


def _state_of(iterator: Any) -> _Iteration:
    state: _Iteration | None = getattr(iterator, _STATE, None)
    if state is None:
        state = _Iteration(None)
        setattr(iterator, _STATE, state)
    return state


def _note_request(iterator: Any, index: Any) -> None:
    """Note the ids of a batch that is requested: of a worker, or for the batch that is yielded next."""
    state = _state_of(iterator)
    index = _copied(index)
    workers = internals.workers_iterator.value
    if workers is None or not isinstance(iterator, workers):
        # Without the class it is not known whether workers load the batch.
        state.yielding = index if workers is not None else None
        return
    request = internals.loader_send_idx.of(iterator)
    if request is None:
        return
    requests = state.requests
    if not request or len(requests) >= _MAX_REQUESTS:
        requests.clear()  # persistent workers begin an epoch
    requests[request] = index


def _note_arrival(iterator: Any, args: tuple[Any, ...]) -> None:
    """Determine the request of an arrived batch: PyTorch has removed it from its table of outstanding requests."""
    state = _state_of(iterator)
    state.worker = args[1] if len(args) > 1 else 0  # PyTorch passes the worker from 2.7 on
    requests = state.requests
    outstanding, expected = internals.loader_task_info.of(iterator), internals.loader_rcvd_idx.of(iterator)
    if outstanding is None or expected is None:
        state.yielding = None
        return
    for request in (expected - 1, expected):  # it is counted before this call, or by it in earlier versions
        if request in requests and request not in outstanding:
            state.yielding = requests.pop(request)
            return
    arrived = [request for request in requests if request not in outstanding]
    state.yielding = requests.pop(arrived[0]) if len(arrived) == 1 else None


def _yielded(iterator: Any, batch: Any, caller: FrameType) -> None:
    state = _state_of(iterator)
    yielded = internals.loader_num_yielded.of(iterator)
    if yielded is None:
        return
    number = yielded - 1
    if number == 0 or state.epoch < 0:
        state.begin_epoch(iterator)
    ids = _ids_of(iterator, state)
    if _fetches_ahead(caller):
        _pass_on(state)
        if number == 0:  # later, the frame's locals would keep a batch in memory
            state.skipped = getattr(caller.f_locals.get("self"), "skip_batches", 0)
        state.ahead = (batch, ids, state.epoch, number) if number >= state.skipped else None
    else:
        _notify(state.loader(), batch, ids, state.epoch, number)


def _pass_on(state: _Iteration) -> None:
    """Report the batch that Accelerate passes on, now that it has fetched the next one or reached the end."""
    ahead, state.ahead = state.ahead, None
    if ahead is not None:
        _notify(state.loader(), *ahead)


def _notify(
    loader: DataLoader[Any] | None, batch: Any, ids: Sequence[Any] | None, epoch: int, number: int
) -> None:
    for reference in _listeners:
        if (listener := reference()) is not None:
            try:
                listener.batch_yielded(loader, batch, ids, epoch, number)
            except Exception as error:  # noqa: BLE001 - as above
                listener.failed(error)


def _ids_of(iterator: Any, state: _Iteration) -> Sequence[Any] | None:
    dataset = internals.loader_dataset.of(iterator)
    if isinstance(dataset, IterableDataset):
        return ({"loader_worker": state.worker, "epoch": state.epoch, "batch": state.next_of_worker()},)
    index, state.yielding = state.yielding, None
    collates = internals.loader_auto_collation.of(iterator)
    if index is None or dataset is None or collates is None or internals.undispatched.is_missing:
        return None
    if not collates and not isinstance(index, list):
        index = (index,)  # one sample; a sampler of batches gives lists
    elif isinstance(index, tuple):
        index = tuple(tuple.__iter__(index))
    elif type(index) is torch.Tensor:
        with internals.undispatched.value():
            index = index.tolist()
    elif type(index) not in _PLAIN:
        return None  # the program may read it only once
    if not _has_plain_subsets(dataset):
        return None
    with internals.undispatched.value():
        return underlying_ids(dataset, index)


_PLAIN = frozenset({list, tuple, range})
"""Sequences whose items can be read without code of the program."""


def _copied(index: Any) -> Any:
    """Return a copy of the ids that a sampler gave, which may give the same list again with others. None if there are too many."""
    if type(index) is torch.Tensor:
        if internals.undispatched.is_missing:
            return None
        with internals.undispatched.value():
            return index.detach().clone() if index.numel() <= _MAX_COPIED else None
    if isinstance(index, list):
        return list(list.__iter__(index)) if list.__len__(index) <= _MAX_COPIED else None
    return index


def _has_plain_subsets(dataset: Any) -> bool:
    """Whether the indices of a `Subset`, also of subsets of subsets, can be read without code of the program, such as one that draws a number."""
    for _ in range(_MAX_NESTED):
        if type(dataset) is not Subset:
            break
        indices = _stored(dataset, "indices")
        if type(indices) not in {*_PLAIN, torch.Tensor} and type(indices).__module__ != "numpy":
            return False
        dataset = _stored(dataset, "dataset")
    return True


def _stored(value: Any, name: str) -> Any:
    """Return an attribute that an object of the program stores; None if it stores none.

    Reading it in the usual way may run a property, and a truth test may run ``__len__``, which makes batches in some samplers.
    """
    try:
        return object.__getattribute__(value, "__dict__").get(name)
    except AttributeError:
        return None


def _epoch_of(iterator: Any, loader: DataLoader[Any] | None) -> int:
    """Return the epoch that begins: the number of earlier iterations, or the sampler's if that is larger."""
    count = 0
    if loader is not None:
        count = _epochs[loader] = _epochs.get(loader, -1) + 1
    sampler = internals.loader_sampler.of(iterator)
    for _ in range(_MAX_NESTED):
        epoch = _stored(sampler, "epoch")
        if type(epoch) is int:
            return max(count, epoch)
        inner = _stored(sampler, "batch_sampler")
        sampler = inner if inner is not None else _stored(sampler, "sampler")
        if sampler is None:
            break
    return count


def _reference_to(loader: DataLoader[Any] | None) -> Callable[[], DataLoader[Any] | None]:
    """Return a reference from an iterator to its data loader, which the program may have only iterated and not kept.

    With persistent workers it is weak, because the data loader refers to its iterator: a cycle would delay the end of the workers.
    """
    if loader is None:
        return _unknown
    return weakref.ref(loader) if loader.persistent_workers else functools.partial(_same, loader)


def _same(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader


def _unknown() -> None:
    return None
