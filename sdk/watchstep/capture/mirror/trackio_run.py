"""A run of Trackio.

A ``trackio.Run`` counts the steps of rows that are logged without ``step=``, from the largest one on. Mirrored rows would move the program's own to later steps.
They are therefore logged by a second object of the same run, which has a count of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from watchstep.capture.mirror.mirrored_run import PREFIX, AlertChange, MirroredPoint, OtherRun, RunLinks

_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class TrackioRun:
    """The run that was current on the training thread."""

    def __init__(self, run: Any) -> None:
        """Open the run a second time.

        Args:
            run: a ``trackio.Run``.
        """
        import trackio

        self._levels = trackio.AlertLevel
        self._program = run
        server = run._server_base_url  # noqa: SLF001 - no public name; checked by the tests on the real library
        space = run._space_id  # noqa: SLF001 - as above
        self._run = type(run)(
            url=run.url,
            project=run.project,
            client=None,
            name=run.name,
            run_id=run.id,
            group=run.group,
            config=_public(run.config),
            space_id=space,
            bucket_id=run._bucket_id,  # noqa: SLF001 - as above
            server_base_url=server,
            write_token=run._write_token,  # noqa: SLF001 - as above
            existing_runs=[run.name],
            initial_last_step=0,
        )
        # What replaces the program's config on the server must be the same, with its time of creation.
        self._run.config.update(run.config)
        url = f"https://huggingface.co/spaces/{space}" if space else str(server or "")
        self._identity = OtherRun(str(run.id), url, f"{run.project}/{run.name}")

    @property
    def identity(self) -> OtherRun:
        """Its id, and its project and name; the URL of its Space or server if it has one."""
        return self._identity

    @property
    def is_over(self) -> bool:
        """False: it has an object of its own."""
        return False

    def link(self, links: RunLinks) -> None:
        """Add the links to the run's config, as ``watchstep``. It is stored with the next row.

        The last config that is stored replaces the others, so the program's must contain them too, also where it waits to be stored.
        """
        data = links.as_data()
        for run in (self._program, self._run):
            run.config[PREFIX] = data
        with self._program._queue_lock:  # noqa: SLF001 - as above
            for entry in self._program._queued_logs:  # noqa: SLF001 - as above
                if entry.get("config"):
                    entry["config"] = {**entry["config"], PREFIX: data}
        self._run._config_logged = False  # noqa: SLF001 - as above

    def alert(self, change: AlertChange) -> None:
        """Send an alert of Trackio for an alert that fires."""
        if change.phase == "firing":
            level = getattr(self._levels, _LEVELS.get(change.severity, "WARN"))
            self._run.alert(f"Watchstep: {change.name}", change.text, level, step=change.step)

    def write(self, points: Sequence[MirroredPoint]) -> int:
        """Log a row for each point, with its own step."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)
        return 0

    def close(self, *, is_stopped: bool) -> int:  # noqa: ARG002 - of the protocol
        """Wait until the rows are stored. The program's own object stays open."""
        self._run.finish()
        return 0


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """The config without Trackio's own entries, which its constructor refuses."""
    return {name: value for name, value in config.items() if not name.startswith("_")}
