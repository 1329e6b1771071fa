"""Ray Tune: a trial whose training goes wrong ends, with the reason in its result; the others go on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from watchstep.client import Client
from watchstep.hook import Hook
from watchstep.integrations import trials
from watchstep.integrations.recording import missing
from watchstep.stopping import OnStop, StopTraining

try:
    from ray import tune
except ImportError as error:
    missing("ray", "ray", error)


class watched:  # noqa: N801 - used like a function, in a with statement
    """Record the trial that this process runs, and end it where its run is stopped by the service or by a guard.

    The run is called ``EXPERIMENT-TRIAL``. The last result of a trial that was stopped has ``watchstep_run``,
    ``watchstep_rule``, ``watchstep_step``, ``watchstep_message`` and ``watchstep_link``; the trial is TERMINATED, and nothing
    behind the block runs.

    Example::

        def train(config):
            with watched("s3://bucket/runs", guard=True, stopped={"loss": math.inf}) as hook:
                hook.watch(model, optimizer)
                ...
                tune.report({"loss": loss})
    """

    def __init__(
        self,
        store_url: str | os.PathLike[str] | None = None,
        *,
        on_stop: OnStop = "raise",
        stopped: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Make the trial's hook.

        Args:
            store_url: as `Hook` takes it; one that every machine of the cluster reaches.
            on_stop: as `Hook` takes it; where it does not raise, the trial ends when the block does.
            stopped: what is reported of a stopped trial besides the reason: the metric that trials are compared by, of which
                it has none, at its worst.
            **options: ``project``, ``rules``, ``guard``, ``config`` and so on, as `Hook` takes them; also ``run``.

        Raises:
            ConfigError: an argument is wrong.
        """
        context = tune.get_context()
        name = trials.run_name(context.get_experiment_name(), context.get_trial_id())
        self._hook = Hook(store_url, on_stop=on_stop, **{"run": name, **options})
        self._stopped = dict(stopped or {})

    def __enter__(self) -> Hook:
        return self._hook

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.__exit__(kind, error, trace)
        if error is not None and not isinstance(error, StopTraining):
            return
        reason = trials.of_stop(self._hook)
        if reason is None:
            return
        tune.report({**self._stopped, **reason.as_data(), "done": True})  # Tune ends a trial that says so
        raise SystemExit(0)  # of the trial's thread: to Tune, as to the system, no fault


class StopAlerted(tune.Stopper):  # type: ignore[misc]
    """Ends each trial on which an alert fires by the service, whether or not the alert's rule stops anything.

    It asks at each result that a trial reports. The trial's last result has the reason, as `watched` records it.

    Example::

        tune.RunConfig(name="sweep", stop=StopAlerted("sweep", "http://watchstep:8460", token))
    """

    def __init__(
        self,
        experiment: str,
        url: str,
        token: str = "",
        *,
        project: str = "default",
        severities: Sequence[str] = ("critical", "warning"),
    ) -> None:
        """Ask nothing yet.

        Args:
            experiment: the name of the experiment, by which `watched` names its runs.
            url: of the service.
            token: to show it; one that may read the project.
            project: whose runs they are.
            severities: of alerts, those that count.

        Raises:
            ConfigError: the URL is none.
        """
        Client(url, token, project)
        self._experiment = experiment
        self._of_client = (url, token, project)
        self._severities = tuple(severities)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether an alert fires on the trial."""
        client = Client(*self._of_client)  # none is kept: Tune writes its stoppers to disk
        run = trials.run_name(self._experiment, trial_id)
        link = trials.alerts_url(self._of_client[0], client.project, run)
        reason = trials.of_service(client, run, self._severities, link)
        if reason is None:
            return False
        result.update(reason.as_data())
        return True

    def stop_all(self) -> bool:
        """Never the whole experiment."""
        return False
