"""A training that no longer records anything, although it has not ended."""

from __future__ import annotations

from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_of_run

_NANOSECONDS = 1_000_000_000
_TICKS = 6
"""Ticks within the threshold: the resolution of the measured silence, and the limit of unobserved time."""

_GIVEN_UP = 4
"""Multiple of the limit after which no more ticks are requested, because the run is abandoned."""


class StalledTrainingParams(Params):
    """Parameters of `StalledTraining`."""

    threshold: float = Field(1800.0, gt=0, description="Tolerated seconds without a row.")
    patience: float = Field(2.0, ge=0, description="Tolerated multiple of the longest pause so far.")


class StalledTrainingState(State):
    """State of `StalledTraining`.

    Attributes:
        tick_ns: the last tick; 0 before the first.
        silent_ns: observed time since the last row.
        longest_ns: the longest pause between rows so far.
        step: the last step; -1 before the first row.
        live: whether rows arrive soon after they are recorded.
    """

    tick_ns: int = 0
    silent_ns: int = 0
    longest_ns: int = 0
    step: int = -1
    live: bool = True


class StalledTraining(Rule[StalledTrainingParams, StalledTrainingState]):
    """Fires when no row of any worker arrived for ``threshold`` seconds by the service's clock, while the attempt has not ended.

    1800 s is the threshold of SageMaker's StalledTrainingRule. Here a silence must also be ``patience`` times as long as the longest pause
    of the run so far, so that an evaluation of an hour after every epoch is reported at most once.

    Only observed time counts: of the time between two ticks no more than a third of the threshold. A service that was down or a laptop
    that was suspended therefore does not create a silence. A run with rows that arrived long after they were recorded (an old run found on
    the store) is not judged until a recent row arrives. An attempt that was claimed and has written nothing is silent since the service
    first saw it; the service does not evaluate attempts of lost runs.

    Off by default: a healthy program may pause for any time (a long evaluation, a slow checkpoint, a data set that is prepared before the
    first step), and no statistics distinguish it from a training that hangs. A dead process is reported by the state *lost* of the run,
    without this rule.
    """

    name = "stalled_training"
    summary = "nothing is recorded, although the training has not ended"
    needs = Needs(collections=())
    merge = "per_worker"
    clock = True
    usual_causes = (
        "a collective waits for a rank that is dead or stuck",
        "the data loader waits for storage or for a worker that died",
        "an evaluation or a checkpoint takes long",
        "records do not reach the store",
    )
    what_to_try = (
        "look at the stack of each rank (py-spy dump), and set a timeout for collectives",
        "check the data loader's workers and their storage",
        "raise the threshold above the longest expected pause",
        "check the run's health for failed uploads",
    )

    def due_ns(self, params: StalledTrainingParams, state: StalledTrainingState) -> int | None:
        """A sixth of the threshold after the last tick, or earlier when the limit is reached."""
        left = _limit(params, state) - state.silent_ns
        if not state.live or state.silent_ns >= _GIVEN_UP * _limit(params, state):
            return None
        return state.tick_ns + (min(_interval(params), left) if left > 0 else _interval(params))

    def evaluate(
        self,
        params: StalledTrainingParams,
        state: StalledTrainingState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[StalledTrainingState, list[Finding]]:
        """Measure the silence up to this tick; rows end it. A silence beyond the limit is reported at every tick."""
        watched = min(max(0, now - state.tick_ns), 2 * _interval(params)) if state.tick_ns else 0
        silent = state.silent_ns + watched
        if len(block):
            return _after_rows(params, state, block, now, silent), []
        state = state.model_copy(update={"tick_ns": now, "silent_ns": silent})
        limit = _limit(params, state)
        if not state.live or silent < limit:
            return state, []
        return state, [self._finding(state, limit, now)]

    def _finding(self, state: StalledTrainingState, limit: int, now: int) -> Finding:
        seconds, most = state.silent_ns / _NANOSECONDS, limit / _NANOSECONDS
        since = f"since step {state.step}" if state.step >= 0 else "since the attempt began"
        before = (
            f"; the longest earlier pause took {state.longest_ns / _NANOSECONDS:.0f} s"
            if state.longest_ns
            else ""
        )
        message = f"nothing was recorded for {seconds:.0f} s, {since}, {most:.0f} s tolerated{before}"
        return finding_of_run(self.name, state.step, now, value=seconds, threshold=most, message=message)


def _after_rows(
    params: StalledTrainingParams, state: StalledTrainingState, block: Block, now: int, silent: int
) -> StalledTrainingState:
    fresh = now - int(block.time_ns.max()) < params.threshold * _NANOSECONDS
    begun = state.step >= 0
    return StalledTrainingState(
        tick_ns=now,
        longest_ns=max(state.longest_ns, silent) if begun else 0,
        step=max(state.step, int(block.step.max())),
        live=fresh or (begun and state.live),
    )


def _interval(params: StalledTrainingParams) -> int:
    return round(params.threshold * _NANOSECONDS / _TICKS)


def _limit(params: StalledTrainingParams, state: StalledTrainingState) -> int:
    return max(round(params.threshold * _NANOSECONDS), round(params.patience * state.longest_ns))
