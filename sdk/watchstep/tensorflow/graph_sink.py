"""Updates inside of TensorFlow's graphs: their figures leave a compiled step through variables.

At each update, the graph writes one row of a ring: the number of the update, its loss, whether its gradients are finite, the scale of
the loss and the learning rate. Gradients are copied to variables only at an update that the host requested, and at the first one
that is not finite. The host reads the ring after the call that ran the graph, and measures the copies there.

This works alike with and without XLA, in loops of a graph, and without recompilation: what is due is the value of a variable. Measured
alternatives are in decision 179.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from watchstep.tensorflow import function_calls
from watchstep.tensorflow.host_tensors import ScaledArrays, host_array, host_values
from watchstep.tensorflow.internals import is_compiled
from watchstep.updates.tensor_values import HostArrays, TensorValues

SLOTS = 256
"""Number of updates of one call that are recorded one by one."""

SLICES = 8
"""A large gradient is checked completely in as many updates."""

_WHOLE_ELEMENTS = 16_384
_FLOAT32_BYTES = 4
_NUMBER, _LOSS, _IS_BAD, _SCALE, _RATE, _IS_SAVED, _FORM = range(7)
_COLUMNS = 7
_NEVER = -1


@dataclass(frozen=True)
class _Form:
    """What an update consists of.

    Attributes:
        variables: ids of the variables.
        copies: copies of their gradients; None for one that does not exist.
        has_loss: whether the loss is known.
        has_scale: whether the loss is scaled.
        has_rate: whether the learning rate is known.
    """

    variables: tuple[int, ...]
    copies: tuple[Any, ...]
    has_loss: bool
    has_scale: bool
    has_rate: bool


@dataclass(frozen=True)
class GraphUpdate:
    """One update, as read from the ring.

    Attributes:
        number: its number, from 0.
        form: index of the variables that it updates, as `GraphSink.add` returned it.
        loss: its loss; None if the graph has none.
        is_bad: whether its gradients contain NaN or infinity.
        scale: scale of its loss; None without loss scaling.
        learning_rate: learning rate; None if unknown.
        gradients: its gradients, if they were copied.
    """

    number: int
    form: int
    loss: float | None
    is_bad: bool
    scale: float | None
    learning_rate: float | None
    gradients: TensorValues | None


class GraphSink:
    """The variables of one optimizer, and the operations that write them.

    The variables are the recorder's own: they belong to no model and no optimizer, and are not in any checkpoint. All updates of the optimizer share
    them, so that their order is known, also where the variables that have a gradient change. The copy of a gradient is that of its last update.
    """

    def __init__(self, *, checks_all: bool) -> None:
        """Create the variables. May be called while a function is traced.

        Args:
            checks_all: whether all elements are checked at each update, and not an eighth of those of large gradients in turn.
        """
        self._checks_all = checks_all
        self._copies: dict[int, list[Any]] = {}
        self._forms: list[_Form] = []
        _outside_of_graphs(self._create)
        self._read = 0

    def _create(self) -> None:
        self._ring = tf.Variable(np.full((SLOTS, _COLUMNS), _NEVER, np.float64), trainable=False)
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._requested = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._has_bad = tf.Variable(False, trainable=False)
        self._copied_at = tf.Variable([_NEVER, 0], dtype=tf.int64, trainable=False)

    def _copies_of(self, variables: Sequence[int], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return copies of gradients. Those that do not exist are created."""
        shapes = [None if gradient is None else _shape(gradient) for gradient in gradients]
        fitting: list[Any] = [
            next((copy for copy in self._copies.get(key, ()) if _fits(shape, gradient, copy)), None)
            for key, shape, gradient in zip(variables, shapes, gradients, strict=True)
        ]

        def create() -> None:
            for place, (key, shape, gradient) in enumerate(zip(variables, shapes, gradients, strict=True)):
                if gradient is not None and fitting[place] is None:
                    fitting[place] = _copy_of(shape, gradient.dtype)
                    self._copies.setdefault(key, []).append(fitting[place])

        if any(copy is None and shape is not None for copy, shape in zip(fitting, shapes, strict=True)):
            _outside_of_graphs(create)
        return tuple(fitting)

    def _number_of(self, form: _Form) -> int:
        """Return the index of a form."""
        for number, other in enumerate(self._forms):
            is_same = replace(other, copies=()) == replace(form, copies=())
            if is_same and all(map(operator.is_, other.copies, form.copies)):
                return number
        self._forms.append(form)
        return len(self._forms) - 1

    def add(
        self,
        variables: Sequence[int],
        gradients: Sequence[Any],
        *,
        loss: Any = None,
        is_finite: Any = None,
        scale: Any = None,
        learning_rate: Any = None,
    ) -> int:
        """Add the operations of one update to the graph that is being traced.

        Args:
            variables: identifies the variable of each gradient.
            gradients: symbolic tensors or slices of rows, multiplied by ``scale``; None for one that does not exist.
            loss: loss, of shape ().
            is_finite: whether all gradients are finite, bool of shape (); computed if it is None. The computed one may be False for finite
                gradients with a sum that overflows; the copies decide. It may be True for a large gradient of which another part is not.
            scale: scale of the loss, of shape ().
            learning_rate: learning rate, of shape ().

        Returns:
            The index of these variables and gradients, which is also that of later updates of the same ones.
        """
        copies, is_whole = self._copies_of(variables, gradients), is_compiled()
        form = self._number_of(
            _Form(tuple(variables), copies, loss is not None, scale is not None, learning_rate is not None)
        )
        values = [
            None if gradient is None else getattr(gradient, "values", gradient) for gradient in gradients
        ]
        number = self._count.read_value()
        if is_finite is None:
            turn = None if self._checks_all else tf.math.floormod(number, SLICES)
            is_finite = _sum_is_finite([value for value in values if value is not None], turn)
        is_bad = tf.logical_not(is_finite)
        first_bad = tf.logical_and(is_bad, tf.logical_not(self._has_bad.read_value()))
        requested = tf.logical_and(
            tf.equal(number, self._requested.read_value()), ~self._has_bad.read_value()
        )
        is_saved = tf.logical_or(first_bad, requested)

        def save() -> Any:
            for gradient, copy in zip(gradients, copies, strict=True):
                if gradient is not None and copy is not None:
                    copy.assign(_copied(gradient, is_whole=is_whole))
            self._has_bad.assign(is_bad)
            self._copied_at.assign(tf.stack([number, tf.constant(form, tf.int64)]))
            return tf.constant(True)

        was_saved = tf.cond(is_saved, save, lambda: tf.constant(False))
        row = [
            _float64(number),
            _scalar(loss),
            _float64(is_bad),
            _scalar(scale),
            _scalar(learning_rate),
            _float64(was_saved),
            tf.constant(form, tf.float64),
        ]
        slot = tf.math.floormod(number, SLOTS)
        written = self._ring.scatter_nd_update(tf.reshape(slot, (1, 1)), tf.expand_dims(tf.stack(row), 0))
        with tf.control_dependencies([written]):  # a call that fails before its update has none
            self._count.assign_add(1, read_value=False)
        function_calls.add_own(
            [
                self._ring,
                self._count,
                self._requested,
                self._has_bad,
                self._copied_at,
                *(copy for copy in copies if copy is not None),
            ]
        )
        return form

    def request(self, *, is_due: bool) -> None:
        """Request the gradients of the next update, for the next call."""
        if is_due:
            self._requested.assign(self._read, read_value=False)

    def read(self) -> tuple[int, list[GraphUpdate]]:
        """Return the number of the first update since the last call, and these updates in order.

        Of more than `SLOTS` updates the first ones are missing, except the one whose gradients were copied. Waits until they are computed.
        """
        ring = host_array(self._ring.read_value())
        numbers = ring[:, _NUMBER]
        new = np.flatnonzero(numbers >= self._read)
        if not len(new):
            return self._read, []
        rows = list(ring[new[np.argsort(numbers[new])]])
        begin, first = self._read, int(rows[0][_NUMBER])
        saved = [row for row in rows if row[_IS_SAVED]]
        is_bad = any(row[_IS_BAD] for row in saved)
        updates = []
        if first > begin and not saved:
            number, form = self._copied_at.numpy().tolist()
            if number >= begin:
                is_bad = bool(self._has_bad.read_value())
                row = [number, math.nan, is_bad, math.nan, math.nan, 1, form]
                update = self._update(row, self._gradients(form))
                updates = [replace(update, loss=None, scale=None, learning_rate=None)]
        gradients = self._gradients(int(saved[-1][_FORM])) if saved else None
        updates += [self._update(row, gradients if saved and row is saved[-1] else None) for row in rows]
        if is_bad:
            self._has_bad.assign(False, read_value=False)
        self._read = int(rows[-1][_NUMBER]) + 1
        return begin, updates

    def forgive(self) -> None:
        """Copy gradients again after a call that failed, which may have copied some of an update that it has not made."""
        self._has_bad.assign(False, read_value=False)

    def _gradients(self, form: int) -> HostArrays:
        return host_values(None if copy is None else copy.read_value() for copy in self._forms[form].copies)

    def _update(self, row: Any, gradients: HostArrays | None) -> GraphUpdate:
        is_bad, form = bool(row[_IS_BAD]), self._forms[int(row[_FORM])]
        if is_bad and gradients is not None:
            is_bad = gradients.has_nonfinite(0, 1)
        scale = float(row[_SCALE]) if form.has_scale else None
        values: TensorValues | None = gradients
        if gradients is not None and scale is not None and math.isfinite(scale) and scale:
            values = ScaledArrays(gradients, scale)
        return GraphUpdate(
            number=int(row[_NUMBER]),
            form=int(row[_FORM]),
            loss=float(row[_LOSS]) if form.has_loss else None,
            is_bad=is_bad,
            scale=scale,
            learning_rate=float(row[_RATE]) if form.has_rate else None,
            gradients=values,
        )


def _outside_of_graphs(create: Callable[[], None]) -> None:
    """Run a function outside of all graphs, scopes and strategies of this thread: in a thread of its own.

    TensorFlow allows no variables in later traces of a function, not even in `tf.init_scope`.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            create()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="watchstep-variables")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _copy_of(shape: Any, dtype: Any) -> Any:
    """Return a variable for copies of a gradient; of an unknown number of rows, if the gradient's is unknown."""
    known = [0 if size is None else size for size in shape]
    return tf.Variable(tf.zeros(known, dtype), trainable=False, shape=shape)


def _fits(shape: Any, gradient: Any, copy: Any) -> bool:
    return gradient is not None and gradient.dtype == copy.dtype and copy.shape.is_compatible_with(shape)


def _shape(gradient: Any) -> Any:
    """Return the shape of the copies of a gradient.

    The number of a table's rows with gradients differs from step to step. XLA needs fixed shapes, so copies there are of whole tables.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient.shape
    if is_compiled():
        return tf.TensorShape(tf.get_static_value(gradient.dense_shape))
    return tf.TensorShape([None, *gradient.values.shape[1:]])


def _copied(gradient: Any, *, is_whole: bool) -> Any:
    """Return the elements of a gradient that are copied."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.convert_to_tensor(gradient) if is_whole else gradient.values


def _sum_is_finite(values: Sequence[Any], turn: Any) -> Any:
    """Return whether the sums of tensors are finite: one pass over each, or over an eighth of it, without a temporary.

    Args:
        values: the tensors.
        turn: which eighth of a large tensor is added; None for all of it.
    """
    sums = []
    for value in values:
        if not (value.dtype.is_floating or value.dtype.is_complex):
            continue
        part = value if turn is None else _part(value, turn)
        part = tf.cast(part, tf.float32) if value.dtype.size < _FLOAT32_BYTES else part
        total = tf.reduce_sum(part)
        parts = (tf.math.real(total), tf.math.imag(total)) if value.dtype.is_complex else (total,)
        sums += [tf.cast(number, tf.float64) for number in parts]  # float32 would overflow by finite float64
    return tf.math.is_finite(tf.add_n(sums)) if sums else tf.constant(True)


def _part(value: Any, turn: Any) -> Any:
    """Return an eighth of a large tensor, in memory that it shares where that is possible; a small one as a whole."""
    elements = value.shape.num_elements()
    if elements is None or elements <= _WHOLE_ELEMENTS:
        return value
    size = -(-elements // SLICES)
    flat = tf.reshape(value, (elements,))
    # XLA compiles a slice anew for each beginning that is a variable.
    branches = [
        functools.partial(_slice_of, flat, min(number * size, elements - size), size)
        for number in range(SLICES)
    ]
    return tf.switch_case(tf.reshape(tf.cast(turn, tf.int32), ()), branches)


def _slice_of(flat: Any, begin: int, size: int) -> Any:
    return flat[begin : begin + size]


def _scalar(value: Any) -> Any:
    return tf.constant(math.nan, tf.float64) if value is None else _float64(value)


def _float64(value: Any) -> Any:
    return tf.cast(value, tf.float64)
