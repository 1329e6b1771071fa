"""A training that records nothing any more, though nobody said that it ended."""

from __future__ import annotations

from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_of_run

_NANOSECONDS = 1_000_000_000
_LOOKS = 6
"""Ticks within the threshold: how finely silence is measured, and how much of it may pass unwatched."""

_GIVEN_UP = 4
"""After so many times the limit no more ticks are asked for: nobody is waiting for this run."""


class StalledTrainingParams(Params):
    """Parameters of `StalledTraining`."""

    threshold: float = Field(1800.0, gt=0, description="Seconds without a row that are too long.")
    patience: float = Field(2.0, ge=0, description="Not before so many times the longest pause so far.")


class StalledTrainingState(State):
    """How long nothing has come.

    Attributes:
        tick_ns: the last tick; 0 before the first.
        silent_ns: watched time since the last row.
        longest_ns: the longest pause between rows so far.
        step: the last step; -1 before the first row.
        live: rows came as they were taken, not long after.
    """

    tick_ns: int = 0
    silent_ns: int = 0
    longest_ns: int = 0
    step: int = -1
    live: bool = True


class StalledTraining(Rule[StalledTrainingParams, StalledTrainingState]):
    """Fires when no row of any worker came for ``threshold`` seconds by the service's clock, while the attempt lasts.

    1800 s is SageMaker's StalledTrainingRule. Here a silence must also be ``patience`` times as long as the longest pause
    that the run has made and come back from: an evaluation of an hour after every epoch is told once at the most.

    Only time that was watched counts: of what passes between two ticks no more than a third of the threshold. So neither
    a service that was down nor a laptop that slept makes a silence. A run whose rows were taken long before they came
    (an old one, found on the store) is not judged until a fresh one comes. An attempt that was claimed and has written
    nothing is silent since the service first saw it; the service leaves out those of runs that it holds for lost.

    Off by default. A healthy program may be silent for any time (a long evaluation, a checkpoint that is slow to write, a data set
    that is prepared before the first step), and no statistics tell that from a training that hangs. That a process is
    dead is said by the run's state, *lost*, without this rule.
    """

    name = "stalled_training"
    summary = "nothing is recorded any more, though the training has not ended"
    needs = Needs(collections=())
    merge = "per_worker"
    clock = True
    usual_causes = (
        "a collective waits for a rank that is gone or stuck",
        "the data loader waits for storage or for a worker that died",
        "an evaluation or a checkpoint takes long",
        "records do not reach the store",
    )
    what_to_try = (
        "look at the stack of each rank (py-spy dump), and set a timeout for collectives",
        "look at the data loader's workers and the storage behind them",
        "raise the threshold above the longest pause that you expect",
        "look at the run's health for uploads that fail",
    )

    def due_ns(self, params: StalledTrainingParams, state: StalledTrainingState) -> int | None:
        """A sixth of the threshold after the last tick, or when the silence becomes too long."""
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
        """Measure the silence up to this tick; rows end it. One that is too long is told at every tick."""
        watched = min(max(0, now - state.tick_ns), 2 * _interval(params)) if state.tick_ns else 0
        silent = state.silent_ns + watched
        if len(block):
            return _heard(params, state, block, now, silent), []
        state = state.model_copy(update={"tick_ns": now, "silent_ns": silent})
        limit = _limit(params, state)
        if not state.live or silent < limit:
            return state, []
        return state, [self._finding(state, limit, now)]

    def _finding(self, state: StalledTrainingState, limit: int, now: int) -> Finding:
        seconds, most = state.silent_ns / _NANOSECONDS, limit / _NANOSECONDS
        since = f"since step {state.step}" if state.step >= 0 else "since the attempt began"
        before = (
            f"; the longest pause before took {state.longest_ns / _NANOSECONDS:.0f} s"
            if state.longest_ns
            else ""
        )
        message = f"nothing was recorded for {seconds:.0f} s, {since}, {most:.0f} s tolerated{before}"
        return finding_of_run(self.name, state.step, now, value=seconds, threshold=most, message=message)


def _heard(
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
    return round(params.threshold * _NANOSECONDS / _LOOKS)


def _limit(params: StalledTrainingParams, state: StalledTrainingState) -> int:
    return max(round(params.threshold * _NANOSECONDS), round(params.patience * state.longest_ns))
