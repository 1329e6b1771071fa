"""Training passes in a row without a finite update: a few are how programs skip bad batches, many are a training that stands still.

A pass whose loss or gradient norm is not finite, a step that a gradient scaler leaves out, and an update by a non-finite gradient
count. Any other update ends the count, also one whose loss was NaN: of a batch without labels the gradient is zero.
"""

from __future__ import annotations

from watchstep import tensors
from watchstep.capture.session import Session

METRIC = "updates:missing"
_HANDED_OVER = 50


class MissingUpdates:
    """Records, as ``updates:missing``, how many steps in a row had no finite update, and 0 at the first that has one again.

    A program that skips updates by itself stays within one step of the run. Its passes count as steps, and every fiftieth hands
    over what was recorded so far, for such a step may never end.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._wanted = session.config.gate and tensors.METRICS in session.config.chosen
        self._name = f"{prefix}.{METRIC}" if prefix else METRIC
        self._steps = 0
        self._passes = 0
        self._counted = False

    def pass_begins(self, *, logged_nan: bool) -> None:
        """A forward pass begins.

        Args:
            logged_nan: whether the program has logged a loss of the pass before it that is NaN.

        Raises:
            StopTraining: a guard asks for it.
        """
        if logged_nan:
            self.pass_is_bad()
        self._counted = False

    def backward_begins(self, *, finite: bool) -> None:
        """A loss is about to be differentiated: another pass, or another micro-batch of it.

        Raises:
            StopTraining: a guard asks for it.
        """
        self._counted = False
        if not finite:
            self.pass_is_bad()

    def pass_is_bad(self) -> None:
        """The loss or the gradient norm of the pass under way is not finite.

        Raises:
            StopTraining: a guard asks for it.
        """
        if self._counted:
            return
        self._counted = True
        self._passes += 1
        self._tell()
        if self._wanted and self._passes % _HANDED_OVER == 0:
            self._recorder.hand_over_unfinished()

    def left_out(self) -> None:
        """A step is over whose update was left out, or was not finite."""
        self._steps, self._passes, self._counted = self._steps + 1, 0, False
        self._tell()

    def updated(self) -> None:
        """A finite update was made."""
        if self._steps or self._passes:
            self._steps = self._passes = 0
            self._tell()
        self._counted = False

    def _tell(self) -> None:
        if self._wanted:
            self._recorder.scalar(self._name, float(self._steps + self._passes))
