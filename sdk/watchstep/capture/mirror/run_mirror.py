"""The mirror of a run: passes points and alerts to the program's own runs of other tools, on a thread of its own."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.mirror.active_runs import connect, find_active, is_mirrored_by
from watchstep.capture.mirror.mirrored_run import (
    AlertChange,
    MirroredPoint,
    MirroredRun,
    OtherRun,
    RunLinks,
)
from watchstep.capture.mirror.points import PointSource
from watchstep.capture.mirror.service_alerts import ServiceAlerts
from watchstep.capture.mirror.settings import Mirror, MirrorTarget
from watchstep.format.block import Block

_MAX_ROWS = 100_000
"""Rows that wait for the thread, about 15 MB. More are dropped and counted."""

_MAX_POINTS = 10_000
"""Points that wait for the program to begin a run of a tool. The oldest are dropped and counted."""

_MAX_ALERTS = 256
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 2.0
_CLOSE_SECONDS = 5.0
_MIN_CLOSE_SECONDS = 0.2
_SEARCH_STEPS = 1000
"""Steps at each of which an active run is searched for; later one step of ten."""


@dataclass
class _MirroredTool:
    """One tool, used on the mirror's thread; other threads only read.

    Attributes:
        target: the tool.
        state: ``waiting`` for an active run, ``active``, ``failed``, or ``ended``.
        run: the adapter of the run.
        other: identity of the run.
        points: points that wait for the run.
        alerts: changes of alerts that wait for the run.
        passed: number of points that were passed to the tool.
        unwritten: number of those that wait in the tool.
        links: the links that the run has.
    """

    target: MirrorTarget
    state: str = "waiting"
    run: MirroredRun | None = None
    other: OtherRun | None = None
    points: deque[MirroredPoint] = field(default_factory=lambda: deque(maxlen=_MAX_POINTS))
    alerts: deque[AlertChange] = field(default_factory=lambda: deque(maxlen=_MAX_ALERTS))
    passed: int = 0
    unwritten: int = 0
    links: RunLinks | None = None

    def as_data(self) -> dict[str, Any]:
        """State, identity of the other run, and the number of points; JSON-ready."""
        other = {} if self.other is None else self.other.as_data()
        thinned, merged = getattr(self.run, "thinned", 0), getattr(self.run, "merged", 0)
        points = self.passed - self.unwritten - thinned - merged
        data = {"state": self.state, **other, "points": points}
        return {**data, "thinned": thinned} if thinned else data


class RunMirror:
    """Mirrors one worker. No method blocks or raises, except `close`, which waits within a time limit.

    A tool that fails is reported in health once and is not used again. A tool without an active run gets nothing; health reports that.
    """

    def __init__(
        self, mirror: Mirror, worker: int, links: Callable[[], RunLinks], health: RecorderHealth
    ) -> None:
        """Create a mirror. Nothing is written before the program has an active run.

        Args:
            mirror: the tools and the series.
            worker: the rank.
            links: returns where the run is found in Watchstep.
            health: counts faults, and reports the other runs under ``mirror``.
        """
        self._links = links
        self._health = health
        self._tools = [_MirroredTool(target) for target in mirror.targets if is_mirrored_by(target, worker)]
        self._missing = list(self._tools)
        self._active: deque[tuple[_MirroredTool, Any]] = deque()
        self._searches = 0
        self._source = PointSource(mirror.series)
        self._blocks: deque[Block] = deque()
        self._added = 0  # rows; written by the writer only
        self._taken = 0  # rows; written by the mirror's thread only
        self._alerts: deque[AlertChange] = deque(maxlen=_MAX_ALERTS)
        self._service: ServiceAlerts | None = None
        self._changes: deque[tuple[str, str, int]] = deque(maxlen=_MAX_ALERTS)
        self._last_stop = ""
        self._is_stopped = False
        self._cost: Callable[[float], None] | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchstep-mirror", daemon=True)
        if self._tools:
            health.account("mirror", self.as_data)

    @property
    def is_needed(self) -> bool:
        """Whether this worker mirrors into any tool."""
        return bool(self._tools)

    def as_data(self) -> dict[str, Any]:
        """State of each tool and the identity of its run; JSON-ready."""
        return {tool.target.tool: tool.as_data() for tool in self._tools}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Set a callback for the processor seconds of each turn."""
        self._cost = report

    def follow(self, service: ServiceAlerts) -> None:
        """Also mirror the alerts that the service evaluates. Called before `start`."""
        self._service = service

    def search(self) -> bool:
        """Search for the program's active runs. Called on the training thread. Returns whether all tools have one."""
        self._searches += 1
        if not self._missing or (self._searches > _SEARCH_STEPS and self._searches % 10):
            return not self._missing
        for tool in list(self._missing):
            active = find_active(tool.target)
            if active is not None:
                self._missing.remove(tool)
                self._active.append((tool, active))
                self._wake.set()
        return not self._missing

    def add(self, block: Block) -> None:
        """Add rows. Called on the writer's thread."""
        try:
            rows = self._source.select(block)
            if not len(rows):
                return
            if self._added - self._taken + len(rows) > _MAX_ROWS:
                self._health.count("dropped_mirror_rows", len(rows))
                return
            self._added += len(rows)
            self._blocks.append(rows)
            self._wake.set()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the writer
            self._health.fault("mirror", error)

    def alert(self, change: AlertChange) -> None:
        """Add a change of an alert. Called on any thread."""
        self._alerts.append(change)
        self._wake.set()

    def stop(self, step: int, reason: str) -> None:
        """Add the stop of the training as an alert, once for each reason. Called on any thread."""
        if not self._last_stop or not reason.startswith(self._last_stop):
            self._last_stop = reason
            self.alert(AlertChange("stop", "firing", "critical", step, reason))

    def training_stopped(self, step: int, reason: str) -> None:
        """Note that the training ends because of a stop, so that the program logs nothing more. Called before `close`."""
        self.stop(step, reason)
        self._is_stopped = True

    def close(self, seconds: float) -> None:
        """Write the rest.

        Args:
            seconds: time limit, within fixed bounds.
        """
        self._closing.set()
        self._wake.set()
        self._thread.join(max(_MIN_CLOSE_SECONDS, min(_CLOSE_SECONDS, seconds)))
        if self._thread.is_alive():
            names = [tool.target.tool for tool in self._tools if tool.state == "active"]
            late = TimeoutError(f"{', '.join(names)}: no answer within the time limit of closing")
            self._health.fault("mirror", late)

    def forget(self) -> None:
        """Reset in a forked child: the runs belong to its parent."""
        self._tools, self._missing = [], []
        self._blocks.clear()
        self._alerts.clear()

    def _work(self) -> None:
        pause: float | None = None
        is_last = False
        while not is_last:
            until_poll = None if self._service is None else self._service.seconds
            pauses = [seconds for seconds in (pause, until_poll) if seconds is not None]
            is_woken = self._wake.wait(max(_MIN_RETRY_SECONDS, min(pauses)) if pauses else None)
            self._wake.clear()
            is_last = self._closing.is_set()  # everything was added before
            began = time.thread_time()
            is_waiting = self._turn(is_last=is_last)
            if self._cost is not None:
                self._cost(time.thread_time() - began)
            if not is_waiting:
                pause = None
            elif is_woken or pause is None:
                pause = _MIN_RETRY_SECONDS
            else:
                pause = min(_MAX_RETRY_SECONDS, 1.5 * pause)
            if is_woken and not is_last:
                self._closing.wait(_MIN_RETRY_SECONDS)
        self._finish()

    def _turn(self, *, is_last: bool) -> bool:
        """Pass on what was added. Returns whether points wait in a tool."""
        points = self._new_points(is_last=is_last)
        changes = self._new_changes(is_last=is_last)
        points += [
            MirroredPoint(change.step, time.time_ns(), {change.series: float(change.phase == "firing")})
            for change in changes
        ]
        while self._active:
            tool, active = self._active.popleft()
            self._attempt(tool, functools.partial(self._connect, tool, active))
        waiting = 0
        for tool in self._tools:
            if tool.state == "waiting":
                dropped = max(0, len(tool.points) + len(points) - _MAX_POINTS)
                if dropped:
                    self._health.count("dropped_mirror_points", dropped)
            if tool.state in {"waiting", "active"}:
                tool.points.extend(points)
                tool.alerts.extend(changes)
            if tool.state == "active":
                waiting += self._attempt(tool, functools.partial(self._write, tool))
        return waiting > 0

    def _new_changes(self, *, is_last: bool) -> list[AlertChange]:
        """Changes of alerts, each once: the guard and the service may evaluate the same rule, with the same findings."""
        changes: list[AlertChange] = []
        while self._alerts:
            changes.append(self._alerts.popleft())
        is_polled = self._service is not None and any(tool.state == "active" for tool in self._tools)
        if self._service is not None and is_polled:
            changes += self._service.poll(is_last=is_last)
        new = []
        for change in changes:
            identity = (change.name, change.phase, change.step)
            if identity not in self._changes:
                self._changes.append(identity)
                new.append(change)
        return new

    def _new_points(self, *, is_last: bool) -> list[MirroredPoint]:
        blocks: list[Block] = []
        while self._blocks:
            blocks.append(self._blocks.popleft())
        try:
            points = self._source.add(blocks) if blocks else []
            if is_last:
                points += self._source.finish()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("mirror", error)
            points = []
        self._taken += sum(map(len, blocks))
        if self._source.has_shards:
            self._health.note(
                "mirror series",
                "collections of sharded tensors are not mirrored: a worker has only its own shards",
            )
        return points

    def _connect(self, tool: _MirroredTool, active: Any) -> int:
        tool.run = connect(tool.target, active)
        tool.other = tool.run.identity
        tool.state = "active"
        return 0

    def _write(self, tool: _MirroredTool) -> int:
        """Write what waits to an active tool. Returns the number of points that it could not take yet."""
        assert tool.run is not None
        if tool.run.is_over:
            self._end(tool)
            return 0
        links = self._links()
        if links != tool.links:
            tool.run.link(links)
            tool.links = links
        while tool.alerts:
            tool.run.alert(tool.alerts.popleft())
        points: Sequence[MirroredPoint] = tuple(tool.points)
        tool.points.clear()
        tool.unwritten = tool.run.write(points)
        tool.passed += len(points)
        return tool.unwritten

    def _end(self, tool: _MirroredTool) -> None:
        """End mirroring into a run that the program has finished."""
        tool.state = "ended"
        if tool.points or tool.alerts:
            self._health.note(
                f"mirror {tool.target.tool}",
                f"the program finished its run of {tool.target.tool} before the recording ended: close the hook first",
            )
        tool.points.clear()
        tool.alerts.clear()

    def _attempt(self, tool: _MirroredTool, act: Callable[[], int]) -> int:
        """Call a function; if it fails, report the fault once and do not use the tool again."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - faults of other tools never reach training
            if tool.run is not None and tool.run.is_over:
                self._end(tool)
                return 0
            tool.state = "failed"
            tool.points.clear()
            tool.alerts.clear()
            self._health.fault(f"mirror {tool.target.tool}", error)
            return 0

    def _finish(self) -> None:
        for tool in self._tools:
            if tool.state == "active" and tool.run is not None:
                tool.unwritten = self._attempt(
                    tool, functools.partial(tool.run.close, is_stopped=self._is_stopped)
                )
                if tool.state == "active":
                    tool.state = "ended"
            elif tool.state == "waiting":
                self._health.note(
                    f"mirror {tool.target.tool}",
                    f"the program had no active run of {tool.target.tool}: nothing was mirrored",
                )
