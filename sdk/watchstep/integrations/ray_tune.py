"""Ray Tune: a trial with a faulty training ends, with the reason in its result; the others continue."""

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
    """Record the trial of this process, and end it if its run is stopped by the service or by a guard.

    The run is named ``EXPERIMENT-TRIAL``. The last result of a stopped trial has ``watchstep_run``,
    ``watchstep_rule``, ``watchstep_step``, ``watchstep_message`` and ``watchstep_link``; the trial is TERMINATED, and no code
    after the block runs.

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
        """Create the trial's hook.

        Args:
            store_url: as for `Hook`; accessible from every machine of the cluster.
            on_stop: as for `Hook`; if it does not raise, the trial ends when the block does.
            stopped: values that a stopped trial reports in addition to the reason: the metric that trials are compared by, at its
                worst value.
            **options: ``project``, ``rules``, ``guard``, ``config`` and so on, as for `Hook`; also ``run``.

        Raises:
            ConfigError: an argument is invalid.
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
        tune.report(
            {**self._stopped, **reason.as_data(), "done": True}
        )  # Tune ends a trial that reports "done"
        raise SystemExit(0)  # ends the trial's thread; Tune does not treat it as a failure


class StopAlerted(tune.Stopper):  # type: ignore[misc]
    """Ends each trial with a firing alert in the service, whether or not the alert's rule stops anything.

    It queries the service at each result that a trial reports. The trial's last result has the reason, as recorded by `watched`.

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
        """Create the stopper without sending requests.

        Args:
            experiment: name of the experiment, from which `watched` derives the names of its runs.
            url: URL of the service.
            token: a token that may read the project.
            project: the project of the runs.
            severities: severities of alerts that count.

        Raises:
            ConfigError: the URL is invalid.
        """
        Client(url, token, project)
        self._experiment = experiment
        self._client_arguments = (url, token, project)
        self._severities = tuple(severities)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether an alert fires for the trial."""
        client = Client(*self._client_arguments)  # not kept, because Tune pickles its stoppers
        run = trials.run_name(self._experiment, trial_id)
        link = trials.alerts_url(self._client_arguments[0], client.project, run)
        reason = trials.of_service(client, run, self._severities, link)
        if reason is None:
            return False
        result.update(reason.as_data())
        return True

    def stop_all(self) -> bool:
        """Return False: the experiment as a whole never ends."""
        return False
