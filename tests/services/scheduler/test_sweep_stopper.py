"""Trials that a service's alerts end: the stopper of Ray Tune asks one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.recording import PROJECT, Recording, exploding_from, healthy
from watchstep.integrations import trials
from watchstep_services.core.settings import load_settings
from watchstep_services.db.models import AlertRow
from watchstep_services.serve.embedded import EmbeddedService

pytest.importorskip("ray", reason="Ray is not installed: no trial of Ray Tune")

pytestmark = [  # what Ray says of versions to come
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
WAIT = 60.0


@pytest.mark.ci
def test_a_trial_on_which_an_alert_fires_is_ended_and_no_other(tmp_path: Path) -> None:
    from watchstep.integrations.ray_tune import StopAlerted

    settings = load_settings(
        home=tmp_path / "home", store=str(tmp_path / "store"), sweep_seconds=0.05, listing_seconds=0.05
    )
    with EmbeddedService(settings) as service:
        root = service.service.stores.open(settings.store)
        stopper = StopAlerted("sweep", service.url, service.operator_token, project=PROJECT)
        for trial, value in (("ill", exploding_from(21)), ("well", healthy)):
            recording = Recording(root, run=trials.run_name("sweep", trial)).begin()
            recording.write_all([9, 19, 29], value)

        def judged() -> bool:
            with service.database.read() as session:
                return {row.rule for row in session.query(AlertRow)} >= {"exploding_gradient"}

        assert service.wait_until(judged, WAIT)
        result: dict[str, Any] = {"loss": 1.0}
        assert stopper("ill", result)
        assert result["watchstep_rule"] == "exploding_gradient"
        assert result["watchstep_run"] == "sweep-ill"
        assert not stopper("well", left := {"loss": 1.0})
        assert left == {"loss": 1.0}
        assert not stopper("nobody-knows-it", {})
