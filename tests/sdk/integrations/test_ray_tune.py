"""A sweep of Ray Tune on a real local cluster, one of whose trials goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from watchstep import open_run

ray: Any = pytest.importorskip(
    "ray", reason="RAY IS NOT INSTALLED: ending trials by alerts is not proven by this run"
)
pytestmark = [
    pytest.mark.release,
    # Ray's own processes and sockets, and what it says of versions to come.
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def train(config: dict[str, Any]) -> None:
    import torch
    from ray import tune
    from torch import nn

    from watchstep import CaptureConfig
    from watchstep.integrations.ray_tune import watched

    everything = CaptureConfig(overhead_budget=None, system=None)
    torch.manual_seed(0)
    with watched(config["store"], guard=True, stopped={"loss": math.inf}, config=everything) as hook:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.watch(model, optimizer)
        for step in range(6):
            x = torch.randn(16, 8) * (float("nan") if config["bad"] and step == 3 else 1.0)
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tune.report({"loss": loss.item()})
    tune.report({"loss": loss.item(), "finished": True})


@pytest.mark.usefixtures("_cluster")
def test_a_guard_ends_one_trial_and_the_sweep_continues(tmp_path: Path) -> None:
    from ray import tune

    space = {"store": str(tmp_path / "runs"), "bad": tune.grid_search([False, True, False])}
    tuner = tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path / "ray"), verbose=0),
    )
    results = list(tuner.fit())
    assert [result.error for result in results] == [None, None, None]
    good, bad, other = (result.metrics for result in results)
    assert good["finished"]
    assert other["finished"]
    assert "watchstep_rule" not in good
    assert (bad["loss"], bad["watchstep_rule"], bad["watchstep_step"]) == (math.inf, "nan_or_inf", 3)
    assert bad["watchstep_run"].startswith("sweep-")
    (end,) = open_run(bad["watchstep_link"]).ends()
    assert end.state == "stopped"


def test_a_stopper_polls_the_service_and_ends_trials_with_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    from watchstep.integrations import trials
    from watchstep.integrations.ray_tune import StopAlerted

    stopper = pickle.loads(pickle.dumps(StopAlerted("sweep", "http://127.0.0.1:1")))
    result: dict[str, Any] = {"loss": 1.0}
    assert not stopper("a_00001", result)  # nobody answers: the trial goes on
    assert not stopper.stop_all()
    assert result == {"loss": 1.0}
    reason = trials.Reason("sweep-a_00001", "overfit", 7, "validation loss 2.0", "link")
    monkeypatch.setattr(trials, "of_service", lambda *_: reason)
    assert stopper("a_00001", result)
    assert result["watchstep_rule"] == "overfit"
