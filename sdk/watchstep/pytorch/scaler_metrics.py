"""What is recorded of a gradient scaler: its scale, and the steps that it skips."""

from __future__ import annotations

from torch import Tensor

from watchstep import tensors
from watchstep.capture.record import Condition
from watchstep.capture.session import Session
from watchstep.kernels.ready import Ready
from watchstep.pytorch.scalars import record_tensor
from watchstep.statistics import scalars

SCALE = "gradient_scaler:scale"
SKIPPED = "gradient_scaler:skipped"
_EVERY = 100


class ScalerMetrics:
    """Records ``gradient_scaler:scale`` when it changes, and 1 as ``gradient_scaler:skipped`` at each skipped step.

    On a device the scale is not read; it is recorded at skipped steps and at every hundredth. These two are of
    the collection ``metrics``, whatever its cadence.
    """

    def __init__(self, session: Session) -> None:
        self._recorder = session.recorder
        self._wanted = tensors.METRICS in session.config.chosen
        self._last: float | None = None

    def scale(self, scale: Tensor, *, skipped: bool = False) -> None:
        """The scale of the step under way.

        Args:
            scale: one element.
            skipped: whether the step is known to be left out.
        """
        if not self._wanted:
            return
        if scale.device.type != "cpu":
            if skipped or self._recorder.step % _EVERY == 0:
                record_tensor(self._recorder, SCALE, scale, "train")
            return
        number = scale.item()
        if number != self._last:
            self._last = number
            self._recorder.scalar(SCALE, number)

    def skipped(self, condition: Condition | None = None) -> None:
        """The step under way is left out; or is, if a condition holds that is known later."""
        if not self._wanted:
            return
        if condition is None:
            self._recorder.scalar(SKIPPED, 1.0)
        else:
            self._recorder.awaited_scalar(SKIPPED, Ready(scalars([1.0])), condition=condition)
