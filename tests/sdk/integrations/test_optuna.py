"""Studies of Optuna, some of whose trials go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.training import EVERY_STEP, batches, small_model
from watchstep import Client, Hook, open_run
from watchstep_services.core.settings import Settings
from watchstep_services.serve.embedded import EmbeddedService

optuna: Any = pytest.importorskip(
    "optuna", reason="OPTUNA IS NOT INSTALLED: pruning by alerts is not proven by this run"
)
from watchstep.integrations.optuna import prune_if_alerted, watched  # noqa: E402 - it needs optuna

BAD = 1
"""The trial whose batches turn to NaN."""


def steps(hook: Hook, trial: Any, number: int, wait: Callable[[], None] | None = None) -> float:
    """Train for some steps; in the bad trial all losses from step 3 on are NaN. Waits if configured to."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    hook.watch(model, optimizer)
    loss = torch.zeros(())
    for step, (x, y) in enumerate(batches(number if wait is None else number + 500)):
        if step == number and wait is not None:
            wait()
        bad = trial.number == BAD and step >= 3
        loss = nn.functional.cross_entropy(model(x * float("nan") if bad else x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def studied(objective: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="sweep", sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=3)
    return study


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


def test_a_guard_prunes_one_trial_and_the_study_continues(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        with watched(trial, tmp_path, guard=True, config=EVERY_STEP) as hook:
            return steps(hook, trial, 6)

    study = studied(objective)
    assert states(study) == ["COMPLETE", "PRUNED", "COMPLETE"]
    attributes = study.trials[BAD].user_attrs
    assert (attributes["watchstep_run"], attributes["watchstep_rule"], attributes["watchstep_step"]) == (
        "sweep-1",
        "nan_or_inf",
        3,
    )
    assert "NaN" in attributes["watchstep_message"]
    assert [end.state for end in open_run(attributes["watchstep_link"]).ends()] == ["stopped"]
    assert study.trials[0].user_attrs == {"watchstep_run": "sweep-0"}


@pytest.mark.ci
def test_a_check_prunes_by_alerts_that_stop_nothing(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - rule: nan_or_inf\n")

    def objective(trial: Any) -> float:
        with watched(trial, tmp_path / "runs", guard=str(rules), config=EVERY_STEP) as hook:
            loss = steps(hook, trial, 30)
            prune_if_alerted(trial, hook)
            return loss

    study = studied(objective)
    assert states(study) == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert study.trials[BAD].user_attrs["watchstep_rule"] == "nan_or_inf"
    (end,) = open_run(study.trials[BAD].user_attrs["watchstep_link"]).ends()
    assert end.state == "completed"


def test_other_ends_of_a_trial_are_unchanged(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        with watched(trial, tmp_path, config=EVERY_STEP):
            if trial.number == 0:
                raise optuna.TrialPruned
            if trial.number == 1:
                raise ValueError("no such optimizer")
            return 0.0

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    study = optuna.create_study(study_name="sweep")
    study.optimize(objective, n_trials=3, catch=ValueError)
    assert states(study) == ["PRUNED", "FAIL", "COMPLETE"]
    ends = [open_run(tmp_path / "default" / f"sweep-{number}").ends()[0].state for number in range(3)]
    assert ends == ["completed", "failed", "completed"]


@pytest.mark.ci
def test_a_service_stops_one_trial_and_the_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        store=str(tmp_path / "runs"),
        home=tmp_path / "home",
        sweep_seconds=0.2,
        listing_seconds=0.2,
        grace_seconds=60,
    )
    with EmbeddedService(settings) as service:
        monkeypatch.setenv("WATCHSTEP_SERVICE", service.url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)
        client = Client(service.url, service.operator_token)

        def objective(trial: Any) -> float:
            with watched(trial, settings.store, config=EVERY_STEP) as hook:

                def stop_request() -> None:
                    assert service.wait_until(lambda: hook._recorder.stops.request is not None, 120)

                loss = steps(hook, trial, 6, stop_request if trial.number == BAD else None)
                prune_if_alerted(trial, hook, client)
                return loss

        study = studied(objective)
    assert states(study) == ["COMPLETE", "PRUNED", "COMPLETE"]
    attributes = study.trials[BAD].user_attrs
    assert (attributes["watchstep_rule"], attributes["watchstep_step"]) == ("nan_or_inf", 3)
    assert attributes["watchstep_link"] == f"{service.url}/v1/projects/default/runs/sweep-1/alerts"
