"""The client of the service's API, and its event stream.

The stream reconnects after a failure, and yields each event once, in order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from watchstep.client.documents import (
    Action,
    Alert,
    Event,
    RuleStatus,
    RunInfo,
    RunState,
    RunToken,
    SnapshotInfo,
    Stop,
    read,
)
from watchstep.errors import ConfigError, ServiceError
from watchstep.format.tensors import Mode
from watchstep.platform.transport import (
    ServiceAddress,
    ServiceRefusedError,
    Transport,
    pause_seconds,
    segment,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from urllib3 import BaseHTTPResponse

    from watchstep.client.queries import TensorBytes
    from watchstep.reading.queries import Heatmap, HistogramSeries, Reduce


_CHUNK_BYTES = 64 * 1024
_MAX_LINE = 8 * 1024 * 1024
_RETRYABLE = frozenset((429, 500, 502, 503, 504))


def follow(transport: Transport, path: str, query: Mapping[str, Any], after: int | None) -> Iterator[Event]:
    """Yield the events of a stream without end; a broken connection is continued where it broke.

    Args:
        transport: transport to the service.
        path: path of the stream.
        query: query parameters.
        after: position of the last known event; None for now.

    Raises:
        ServiceRefusedError: the service refuses permanently.
    """
    failures = 0
    while True:
        after_seconds = None
        headers = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": str(after)})
        try:
            with transport.open("GET", path, query, headers=headers) as response:
                for place, event in _messages(response):
                    after, failures = place, 0
                    if event is not None:
                        yield event
        except ServiceRefusedError as error:
            if error.status not in _RETRYABLE:
                raise
            after_seconds = error.after_seconds
        except ServiceError:
            pass  # reconnect from the last position
        failures += 1
        time.sleep(pause_seconds(failures, after_seconds))


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a response as they arrive, each with its line end except for the last.

    Raises:
        ServiceError: a line is too long.
    """
    rest = b""
    while data := response.read1(_CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if len(rest) > _MAX_LINE:
            raise ServiceError(
                f"an event exceeds {_MAX_LINE} bytes", "check proxies between here and the service"
            )
    if rest:
        yield rest


def _messages(response: BaseHTTPResponse) -> Iterator[tuple[int, Event | None]]:
    """Yield positions, with their events. Ends with the connection; incomplete messages are omitted."""
    fields: dict[str, str] = {}
    for line in _lines(response):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "id" in fields and line.endswith(b"\n"):
            place = int(fields["id"])
            yield place, _event(fields["data"], place) if "data" in fields else None
        fields = {}


def _event(text: str, place: int) -> Event:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServiceError(
            f"an event is not valid JSON ({error})", "check proxies between here and the service"
        ) from error
    return read(Event, data, place=place)


Document = TypeVar("Document")
_PAGE = 500
_LARGE_PAGE = 1000
"""Items of a page of tensors: the service reads the whole header of a snapshot for each."""


class Client:
    """Requests one project's data from a service.

    Every method raises `ServiceError` if the service refuses or does not answer, and `NotFoundError` if the object does not
    exist. Lists are iterators that fetch page by page. Thread-safe.

    Args:
        url: URL of the service.
        token: API token.
        project: the project.
        timeout: seconds without data after which a request fails; event streams send a heartbeat every 15.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, token: str = "", project: str = "default", timeout: float = 30.0) -> None:
        self._transport = Transport(ServiceAddress.checked(url, token), timeout)
        self.project = project
        self._root = f"/v1/projects/{segment(project)}"

    @classmethod
    def from_environment(cls, project: str = "default") -> Client:
        """A client of the service in WATCHSTEP_SERVICE, with the token in WATCHSTEP_TOKEN.

        Raises:
            ConfigError: WATCHSTEP_SERVICE is not set.
        """
        address = ServiceAddress.from_environment()
        if address is None:
            raise ConfigError(
                "WATCHSTEP_SERVICE is not set", "set it to the URL that 'watchstep serve' prints"
            )
        return cls(address.url, address.token, project)

    def runs(self, *, states: Sequence[str] = (), alerts: Sequence[str] = ()) -> Iterator[RunInfo]:
        """Runs, newest first, filtered by state and by the phase of an alert."""
        return self._pages(RunInfo, "/runs", "runs", {"state": states, "alert": alerts})

    def run(self, run: str) -> RunState:
        """A run with its state, control document, job, rules and health."""
        data = self._transport.call("GET", self._of(run))
        rules = tuple(read(RuleStatus, rule) for rule in data["rules"])
        return RunState(read(RunInfo, data), data["control"], data["job"], rules, data["health"])

    def alerts(
        self,
        run: str | None = None,
        *,
        phases: Sequence[str] = (),
        severities: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[Alert]:
        """Alerts of one run or of all runs, most recently started first."""
        query = {
            "phase": phases,
            "severity": severities,
            "label": [f"{name}={value}" for name, value in (labels or {}).items()],
        }
        return self._pages(Alert, f"{self._part(run)}/alerts", "alerts", query)

    def alert(self, run: str, fingerprint: str) -> Mapping[str, Any]:
        """An alert over all attempts of its run: who acknowledged it, which silence covers it, and who was not notified and why."""
        answer: Mapping[str, Any] = self._transport.call(
            "GET", f"{self._of(run)}/alerts/{segment(fingerprint)}"
        )
        return answer

    def actions(self, run: str) -> Iterator[Action]:
        """Actions that a run's events caused."""
        return self._pages(Action, f"{self._part(run)}/actions", "actions", {})

    def events(self, run: str | None = None, *, types: Sequence[str] = ()) -> Iterator[Event]:
        """Events of one run or of all runs so far, in the order of their arrival."""
        return self._pages(Event, f"{self._part(run)}/events", "events", {"type": types})

    def events_after(self, run: str | None, place: int) -> tuple[list[Event], int]:
        """One page of the events of one run or of all runs after a position, and the position to continue from.

        Args:
            run: only its events.
            place: 0 for the beginning, otherwise the position that an earlier call returned.
        """
        answer = self._transport.call(
            "GET", f"{self._root}{self._part(run)}/events", {"after": place, "limit": _PAGE}
        )
        return [read(Event, event) for event in answer["events"]], int(answer["after"])

    def follow(
        self, run: str | None = None, *, types: Sequence[str] = (), after: int | None = None
    ) -> Iterator[Event]:
        """Stream the events of one run or of all runs, without end. After a lost connection the stream continues without a gap.

        Args:
            run: only its events.
            types: only events of these types.
            after: the `Event.place` to resume from; 0 for the beginning. Default: now.
        """
        path = f"{self._root}{self._part(run)}/events/stream"
        return follow(self._transport, path, {"type": types}, after)

    def stop(self, run: str, reason: str = "", attempt: str = "") -> Stop:
        """Request a run's workers to stop, then end its job. Repeated requests stop an attempt once."""
        body = {"attempt": attempt} | ({"reason": reason} if reason else {})
        return read(Stop, self._transport.call("POST", f"{self._of(run)}/stop", body=body))

    def request_snapshot(self, run: str, step: int | None = None, attempt: str = "") -> str:
        """Request a snapshot of a step, by default of the next one, from a run's workers; returns the request's id."""
        body = {"step": step, "attempt": attempt}
        return str(self._transport.call("POST", f"{self._of(run)}/control/snapshots", body=body)["id"])

    def set_cadence(self, run: str, every: Mapping[str, int]) -> None:
        """Set the cadence of collections, in steps. Workers choose the cadence of collections that are not listed."""
        self._transport.call("PUT", f"{self._of(run)}/control/cadence", body={"every": dict(every)})

    def allow_restart(self, run: str, reason: str, attempt: str = "") -> None:
        """Allow new attempts of a stopped run, or only one, to start. The stopped attempt stays stopped."""
        body = {"reason": reason, "attempt": attempt} if attempt else {"reason": reason}
        self._transport.call("POST", f"{self._of(run)}/control/restart", body=body)

    def hold(self, run: str, reason: str) -> None:
        """Exempt a run from the project's retention policy until it is released."""
        self._transport.call("PUT", f"{self._of(run)}/hold", body={"reason": reason})

    def release(self, run: str) -> None:
        """Release the hold on a run."""
        self._transport.call("DELETE", f"{self._of(run)}/hold")

    def delete(self, run: str) -> None:
        """Delete an ended run from the store and the service, in the background. Needs an administrator's token."""
        self._transport.call("DELETE", self._of(run))

    def create_token(self, run: str, name: str = "", lifetime_seconds: int | None = None) -> str:
        """Create a token for a run's job that may only record this run. It is returned once; keep it out of logs.

        Needs the operator token that registered the run, or an administrator's token. The token expires after its lifetime, 14 days
        after the end of the run, and when the token that created it is revoked.

        Args:
            run: name of the run.
            name: display name of the token.
            lifetime_seconds: lifetime; default: 90 days, at most 366 days.
        """
        body: dict[str, Any] = {"name": name}
        if lifetime_seconds is not None:
            body["lifetime_seconds"] = lifetime_seconds
        return str(self._transport.call("POST", f"{self._of(run)}/tokens", body=body)["token"])

    def tokens(self, run: str) -> Iterator[RunToken]:
        """The tokens of a run, newest first."""
        return self._pages(RunToken, f"{self._part(run)}/tokens", "tokens", {})

    def revoke_token(self, run: str, token: str) -> None:
        """Revoke a token of a run by its id."""
        self._transport.call("DELETE", f"{self._of(run)}/tokens/{segment(token)}")

    def rules(self, run: str) -> list[RuleStatus]:
        """The rule configs of a run, and their status."""
        return [
            read(RuleStatus, rule) for rule in self._transport.call("GET", f"{self._of(run)}/rules")["rules"]
        ]

    def put_rule(self, name: str, config: Mapping[str, Any], run: str | None = None) -> Mapping[str, Any]:
        """Add or replace a rule config for a run, or for all runs of the project that are registered from now on.

        Returns:
            The rule config as it is stored.
        """
        path = f"{self._root}{self._part(run)}/rules/{segment(name)}"
        stored: Mapping[str, Any] = self._transport.call("PUT", path, body=dict(config))["config"]
        return stored

    def remove_rule(self, name: str, run: str | None = None) -> None:
        """Remove a rule config from a run, or from the runs that are registered from now on."""
        self._transport.call("DELETE", f"{self._root}{self._part(run)}/rules/{segment(name)}")

    def tensors(self, run: str, collection: str | None = None) -> Iterator[Mapping[str, Any]]:
        """Recorded tensors: name, module, shape, dtype, collections."""
        query = {"collection": collection}
        return self._raw_pages(f"{self._part(run)}/tensors", "tensors", query)

    def deviations(self, run: str, attempt: str, step: int) -> Mapping[str, Any]:
        """Evidence for an alert: the tensors that differ most from their own earlier values at a step of an attempt, in descending order."""
        query = {"attempt": attempt, "step": step}
        answer: Mapping[str, Any] = self._transport.call("GET", f"{self._of(run)}/deviations", query)
        return answer

    def overview(
        self, run: str, *, points: int = 1000, first: int = 0, last: int | None = None
    ) -> Mapping[str, Any]:
        """The page of a run: losses, learning rates, events, one lane per rule, configuration, attempts and health.

        Args:
            run: the run.
            points: maximum number of columns over the steps.
            first: first step.
            last: last step; None for the last recorded one.
        """
        query = {"points": points, "first": first, "last": last}
        answer: Mapping[str, Any] = self._transport.call("GET", f"{self._of(run)}/overview", query)
        return answer

    def alert_page(
        self, run: str, fingerprint: str, *, before: int = 200, after: int = 50
    ) -> Mapping[str, Any]:
        """The page of an alert: evidence with thresholds, deviations, what happened before, actions, advice and commands.

        Args:
            run: the run.
            fingerprint: fingerprint of the alert.
            before: number of steps before the alert.
            after: number of steps after it.
        """
        query = {"before": before, "after": after}
        path = f"{self._of(run)}/alerts/{segment(fingerprint)}/page"
        answer: Mapping[str, Any] = self._transport.call("GET", path, query)
        return answer

    def comparison(
        self,
        runs: Sequence[str],
        tensors: Sequence[str] = (),
        figure: str = "mean",
        *,
        align: Literal["step", "time"] = "step",
        points: int = 1000,
    ) -> Mapping[str, Any]:
        """Series of two to eight runs over one grid, the first differences from the first run, and settings that differ.

        Args:
            runs: names of the runs.
            tensors: names of tensors; by default the losses.
            figure: figure of the tensors.
            align: axis: the step, or the time since the first row of each run.
            points: maximum number of columns.
        """
        query = {
            "runs": ",".join(runs), "tensor": list(tensors) or None, "figure": figure, "align": align,
            "points": points,
        }  # fmt: skip
        answer: Mapping[str, Any] = self._transport.call("GET", f"{self._root}/comparison", query)
        return answer

    def series(  # noqa: PLR0913 - each narrows the question
        self,
        run: str,
        tensor: str,
        figure: str,
        *,
        mode: Mode | None = None,
        worker: int | None = None,
        first: int = 0,
        last: int | None = None,
        points: int = 1000,
    ) -> pa.Table:
        """One figure of one tensor over the steps, in at most ``points`` points for each line.

        Returns:
            mode, worker, replica, stage, step, last_step, count, nonfinite, mean, min, max; null where nothing is finite.
        """
        from watchstep.client import queries  # imports numpy

        query = {
            "tensor": tensor, "figure": figure, "mode": mode, "worker": worker, "first": first, "last": last,
            "points": points,
        }  # fmt: skip
        content, _ = self._transport.fetch(
            "GET", f"{self._of(run)}/series", query, headers={"Accept": queries.ARROW}
        )
        return queries.table(content)

    def heatmap(
        self,
        run: str,
        tensors: str | Sequence[str],
        figure: str,
        *,
        mode: Mode | None = "train",
        reduce: Reduce = "mean",
        points: int = 200,
    ) -> Heatmap:
        """One figure of a collection, or of named tensors, over the steps; as `watchstep.reading.run.Run.heatmap`."""
        from watchstep.client import queries  # imports numpy

        selection: dict[str, Any] = (
            {"collection": tensors} if isinstance(tensors, str) else {"tensor": list(tensors)}
        )
        query = {
            "figure": figure,
            "mode": mode,
            "reduce": reduce,
            "points": points,
            "rows": 1000,
            **selection,
        }
        return queries.heatmap(self._transport.call("GET", f"{self._of(run)}/heatmap", query), reduce)

    def histogram(
        self,
        run: str,
        tensor: str,
        *,
        mode: Mode | None = "train",
        worker: int | None = None,
        points: int = 200,
    ) -> HistogramSeries:
        """The distribution of a tensor's elements over powers of two, over the steps."""
        from watchstep.client import queries  # imports numpy

        query = {"tensor": tensor, "mode": mode, "worker": worker, "points": points}
        return queries.histogram(self._transport.call("GET", f"{self._of(run)}/histogram", query))

    def sql(self, run: str, query: str, limit: int = 10_000) -> pa.Table:
        """Run one SELECT over a run's statistics in the service; returns at most ``limit`` rows."""
        from watchstep.client import queries  # imports numpy

        content, _ = self._transport.fetch(
            "POST",
            f"{self._of(run)}/sql",
            None,
            {"query": query, "limit": limit},
            {"Accept": queries.ARROW},
        )
        return queries.table(content)

    def snapshots(self, run: str, collection: str | None = None) -> Iterator[SnapshotInfo]:
        """Snapshots and saved tensors of collections, by attempt, worker, step, mode and collection.

        Args:
            run: id of the run.
            collection: only tensors of this collection; empty for snapshots only.
        """
        query = {} if collection is None else {"collection": collection}
        return self._pages(SnapshotInfo, f"{self._part(run)}/snapshots", "snapshots", query)

    def snapshot_tensors(self, run: str, snapshot: SnapshotInfo) -> Iterator[Mapping[str, Any]]:
        """All tensors of a snapshot or of a collection's object: name, dtype, shape, bytes, part."""
        path = f"{self._part(run)}{_path_of(snapshot)}"
        query = {"collection": snapshot.collection} if snapshot.collection else {}
        return self._raw_pages(path, "tensors", query, _LARGE_PAGE)

    def snapshot_tensor(self, run: str, snapshot: SnapshotInfo, name: str) -> TensorBytes:
        """A tensor of a snapshot or of a collection's object. WATCHSTEP_TENSOR_MB of the service limits its size."""
        from watchstep.client import queries  # imports numpy

        query = {"name": name} | ({"collection": snapshot.collection} if snapshot.collection else {})
        content, headers = self._transport.fetch("GET", f"{self._of(run)}{_path_of(snapshot)}/tensor", query)
        return queries.tensor(
            content, headers.get("x-watchstep-dtype", ""), headers.get("x-watchstep-shape", "")
        )

    def _of(self, run: str) -> str:
        return f"{self._root}{self._part(run)}"

    def _part(self, run: str | None) -> str:
        return "" if run is None else f"/runs/{segment(run)}"

    def _pages(
        self, kind: type[Document], path: str, name: str, query: Mapping[str, Any]
    ) -> Iterator[Document]:
        return (read(kind, item) for item in self._raw_pages(path, name, query))

    def _raw_pages(
        self, path: str, name: str, query: Mapping[str, Any], limit: int = _PAGE
    ) -> Iterator[Mapping[str, Any]]:
        token = None
        while True:
            parameters = {**query, "limit": limit, "page_token": token}
            response = self._transport.call("GET", f"{self._root}{path}", parameters)
            yield from response[name]
            token = response.get("next_page_token")
            if token is None:
                return


def _path_of(snapshot: SnapshotInfo) -> str:
    """Path of a snapshot below its run."""
    return f"/snapshots/{segment(snapshot.attempt)}/{snapshot.worker}/{snapshot.step}/{snapshot.mode}"
