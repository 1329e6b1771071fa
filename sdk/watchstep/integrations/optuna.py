"""Optuna: a trial with a faulty training is pruned, with the reason; the study continues."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from watchstep.client import Client
from watchstep.hook import Hook
from watchstep.integrations import trials
from watchstep.integrations.recording import missing
from watchstep.stopping import OnStop, StopTraining

try:
    from optuna import Trial, TrialPruned
except ImportError as error:
    missing("optuna", "optuna", error)


@contextmanager
def watched(
    trial: Trial,
    store_url: str | os.PathLike[str] | None = None,
    *,
    on_stop: OnStop = "raise",
    **options: Any,
) -> Iterator[Hook]:
    """Record a trial, and prune it if its run is stopped by the service or by a guard.

    The run is named ``STUDY-NUMBER``. A pruned trial has the user attributes ``watchstep_run``, ``watchstep_rule``,
    ``watchstep_step``, ``watchstep_message`` and ``watchstep_link``; other trials have only the first.

    Example::

        def objective(trial):
            with watched(trial, "s3://bucket/runs", guard=True) as hook:
                hook.watch(model, optimizer)
                ...

    Args:
        trial: the study's trial.
        store_url: as for `Hook`.
        on_stop: as for `Hook`; if it does not raise, the trial is pruned when the block ends.
        **options: ``project``, ``rules``, ``guard``, ``config`` and so on, as for `Hook`; also ``run``.

    Raises:
        TrialPruned: the run was stopped.
        ConfigError: an argument is invalid.
    """
    options = {"run": trials.run_name(trial.study.study_name, str(trial.number)), **options}
    hook = Hook(store_url, on_stop=on_stop, **options)
    trial.set_user_attr("watchstep_run", hook.run)
    try:
        with hook:
            try:
                yield hook
            except TrialPruned:
                hook.close()  # pruned by Optuna, or by `prune_if_alerted`: not a failure
                raise
    except StopTraining as stop:
        _prune(trial, trials.of_stop(hook), stop)
    if (reason := trials.of_stop(hook)) is not None:
        _prune(trial, reason)


def prune_if_alerted(
    trial: Trial,
    hook: Hook,
    client: Client | None = None,
    *,
    severities: Sequence[str] = ("critical", "warning"),
) -> None:
    """Prune a trial with a firing alert, whether or not the alert's rule stops anything. Call it regularly, e.g. once per epoch.

    Args:
        trial: the study's trial.
        hook: the hook that records it; alerts of its guard count.
        client: client of the service that evaluates the run, whose alerts count too; each call waits for its answer.
        severities: severities of the service's alerts that count.

    Raises:
        TrialPruned: an alert fires.
    """
    reason = trials.of_stop(hook) or trials.of_guard(hook)
    if reason is None and client is not None:
        reason = trials.of_service(client, hook.run, severities, trials.link_of(hook))
    if reason is not None:
        _prune(trial, reason)


def _prune(trial: Trial, reason: trials.Reason | None, cause: BaseException | None = None) -> NoReturn:
    if reason is None:  # a stop of a hook other than the trial's
        raise TrialPruned(str(cause)) from cause
    for name, value in reason.as_data().items():
        trial.set_user_attr(name, value)
    raise TrialPruned(str(reason)) from cause
