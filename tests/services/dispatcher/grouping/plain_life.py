"""The life of alerts as its documentation tells it, with nothing clever: what the service must do as well.

One run, one worker, three rule configs over three series, one receiver that is told of the run's alerts together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECOND = 10**9
WAIT, INTERVAL, REPEAT = 10 * SECOND, 60 * SECOND, 600 * SECOND
HOLD = {"loss": 2, "first": 1, "tried": 1}
KEEP = {"loss": 3, "first": 1, "tried": 2}
NAMES = tuple(HOLD)
TOLD = ("loss", "first")
"""The others are tried dry."""


@dataclass
class Watched:
    """One rule config on the newest attempt: how many bad and clean steps came in a row."""

    bad: int = 0
    clean: int = 0
    firing: bool = False

    def judge(self, name: str, is_bad: bool) -> str:
        """What a step makes of it: fires, resolved or nothing."""
        self.bad, self.clean = (self.bad + 1, 0) if is_bad else (0, self.clean + 1)
        if not self.firing and self.bad >= HOLD[name]:
            self.firing = True
            return "fires"
        if self.firing and self.clean >= KEEP[name]:
            self.firing = False
            return "resolved"
        return ""


@dataclass
class Known:
    """One alert over all attempts, and what the receiver knows of it."""

    firing: bool = False
    attempt: str = ""
    step: int = -1
    times: int = 0
    acknowledged: bool = False
    told_times: int = 0
    told_firing: bool = False

    @property
    def is_news(self) -> bool:
        return self.told_times != self.times

    @property
    def is_over(self) -> bool:
        return self.told_firing and not self.firing and not self.is_news

    @property
    def lasts(self) -> bool:
        return self.firing and self.told_firing and not self.is_news


@dataclass
class Mute:
    """A silence of one alert."""

    name: str
    ends_ns: int
    holds_stop: bool


@dataclass
class Life:
    """All of it."""

    now_ns: int
    attempt: str = "a0"
    step: int = -1
    watched: dict[str, Watched] = field(default_factory=lambda: {name: Watched() for name in NAMES})
    known: dict[str, Known] = field(default_factory=lambda: {name: Known() for name in NAMES})
    silences: list[Mute] = field(default_factory=list)
    allowed: bool = False
    due_ns: int | None = None
    told_ns: int = 0
    is_open: bool = False
    repeats: int = 0
    stops: list[tuple[str, str]] = field(default_factory=list)
    notifications: list[tuple[str, tuple[tuple[str, str, bool], ...], int, int]] = field(default_factory=list)

    def judge(self, rows: list[frozenset[str]]) -> None:
        """Steps that arrive together; of each, the names that are bad."""
        changed = False
        for name in NAMES:
            for step, bad in enumerate(rows, self.step + 1):
                change = self.watched[name].judge(name, name in bad)
                if change == "fires":
                    self._fires(name, step)
                    changed |= name in TOLD
                elif change == "resolved" and self._resolved(name):
                    changed |= name in TOLD
        self.step += len(rows)
        for name, alert in self.known.items():
            watched = self.watched[name]
            if alert.firing and not watched.firing and not watched.bad and self.step >= alert.step:
                alert.firing = False  # of an earlier attempt, and this one came past the step without it
                changed |= name in TOLD
        if changed:
            self._wake()

    def _fires(self, name: str, step: int) -> None:
        alert = self.known[name]
        if not alert.firing:
            alert.firing, alert.acknowledged = True, False
            alert.times += 1
        alert.attempt, alert.step = self.attempt, step
        if name == "loss":
            self.stops.append((self.attempt, self._stop()))

    def _stop(self) -> str:
        if not self.allowed:
            return "not_allowed"
        if self._silence("loss", holds_stop=True):
            return "silenced"
        asked = (self.attempt, "requested") in self.stops
        return "repeated" if asked else "requested"

    def _resolved(self, name: str) -> bool:
        alert = self.known[name]
        if not alert.firing or alert.attempt != self.attempt:
            return False
        alert.firing = False
        return True

    def _silence(self, name: str, *, holds_stop: bool = False) -> int:
        """When the last silence of an alert ends; 0 for none."""
        held = [one for one in self.silences if one.name == name and one.ends_ns > self.now_ns]
        if holds_stop and held:
            return max(held, key=lambda one: one.ends_ns).holds_stop
        return max((one.ends_ns for one in held), default=0)

    def _wake(self) -> None:
        at = max(self.now_ns, self.told_ns + INTERVAL) if self.is_open else self.now_ns + WAIT
        self.due_ns = at if self.due_ns is None else min(self.due_ns, at)

    def restarts(self) -> None:
        """A new attempt: rules begin anew, alerts go on."""
        self.attempt = f"a{int(self.attempt[1:]) + 1}"
        self.watched = {name: Watched() for name in NAMES}

    def expires(self, name: str) -> None:
        """All silences of an alert are ended."""
        ended = [one for one in self.silences if one.name == name and one.ends_ns > self.now_ns]
        for one in ended:
            one.ends_ns = self.now_ns
        alerts = [self.known[one] for one in TOLD]
        if ended and any(alert.is_news or alert.is_over or alert.firing for alert in alerts):
            self.due_ns = self.now_ns

    def sweep(self) -> None:
        """What is due is told."""
        if self.due_ns is None or self.due_ns > self.now_ns:
            return
        heard = {name: self.known[name] for name in TOLD if not self._silence(name)}
        news = [name for name, alert in heard.items() if alert.is_news]
        over = [name for name, alert in heard.items() if alert.is_over]
        lasting = [name for name, alert in heard.items() if alert.lasts]
        again = self.now_ns >= self.told_ns + REPEAT and any(not heard[name].acknowledged for name in lasting)
        if news or over:
            self._tell(news + lasting, over, repeats=0)
        elif again:
            self._tell(lasting, [], repeats=self.repeats + 1)
        for name in news:
            self.known[name].told_times, self.known[name].told_firing = self.known[name].times, True
        for name in over:
            self.known[name].told_firing = False
        self._schedule()

    def _tell(self, firing: list[str], over: list[str], repeats: int) -> None:
        self.told_ns, self.repeats = self.now_ns, repeats
        said = [(name, "firing", self.known[name].acknowledged) for name in firing]
        said += [(name, "resolved", self.known[name].acknowledged) for name in over]
        status = "firing" if firing else "resolved"
        self.notifications.append((status, tuple(sorted(said)), repeats, self.now_ns))

    def _schedule(self) -> None:
        moments = []
        self.is_open = False
        for name in TOLD:
            alert, silent_until = self.known[name], self._silence(name)
            self.is_open |= alert.lasts or (alert.is_over and not silent_until)
            if silent_until:
                if alert.is_news or alert.is_over or alert.lasts:
                    moments.append(silent_until)
            elif alert.is_over:
                moments.append(self.told_ns + INTERVAL)
            elif alert.lasts and not alert.acknowledged:
                moments.append(self.told_ns + REPEAT)
        self.due_ns = max(self.now_ns, min(moments)) if moments else None
