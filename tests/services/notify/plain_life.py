"""The life of alerts as its documentation tells it, with nothing clever: what the service must do as well.

One run, one worker, four rule configs over three series, three receivers that are told of the run's alerts together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECOND = 10**9
HOLD = {"loss": 2, "first": 1, "tried": 1, "follows": 1}
KEEP = {"loss": 3, "first": 1, "tried": 2, "follows": 2}
NAMES = tuple(HOLD)
TOLD = ("loss", "first", "follows")
"""The others are tried dry."""
SOURCE, TARGET = "loss", "follows"
"""While the one fires, the other is kept quiet."""
REPLACED = {"first": (1, 3), "follows": (2, 1)}
"""Rule configs that are changed as time goes by, and how many clean steps end their alerts: first, and then by turns."""

NEAR = 50
"""Steps after an incident was last extended at which another alert still belongs to it."""

Onset = tuple[int, tuple[str, int]]
"""The first step of the findings that made an alert fire, and the rule config: its name, and how often that was replaced."""

Said = tuple[str, tuple[tuple[str, str, bool], ...], int, int]


@dataclass
class Watched:
    """One rule config on the newest attempt: how many bad and clean steps came in a row."""

    bad: int = 0
    clean: int = 0
    firing: bool = False
    quiet: bool = False

    def judge(self, is_bad: bool, hold: int, keep: int) -> str:
        """What a step makes of it: fires, resolved or nothing."""
        self.bad, self.clean = (self.bad + 1, 0) if is_bad else (0, self.clean + 1)
        if not self.firing and self.bad >= hold:
            self.firing = True
            return "fires"
        if self.firing and self.clean >= keep:
            self.firing = False
            return "resolved"
        return ""


@dataclass
class Known:
    """One alert over all attempts."""

    firing: bool = False
    hidden: bool = False
    attempt: str = ""
    step: int = -1
    times: int = 0
    acknowledged: bool = False
    config: tuple[str, int] = ("", 0)
    incident: tuple[str, int] = ("", -1)


@dataclass
class Heard:
    """What a receiver knows of an alert."""

    alert: Known
    times: int = 0
    firing: bool = False
    joins: bool = False

    @property
    def fires(self) -> bool:
        return self.alert.firing and not self.alert.hidden

    @property
    def is_news(self) -> bool:
        return self.is_untold and not self.joins

    @property
    def is_untold(self) -> bool:
        return not self.alert.hidden and self.times != self.alert.times

    @property
    def is_joined(self) -> bool:
        return self.is_untold and self.joins and self.fires

    @property
    def is_over(self) -> bool:
        return self.firing and not self.fires and not self.is_news

    @property
    def lasts(self) -> bool:
        return self.fires and self.firing and not self.is_untold

    @property
    def matters(self) -> bool:
        return self.is_news or self.is_over or self.lasts or self.is_joined


@dataclass
class Mute:
    """A silence of one alert."""

    name: str
    ends_ns: int
    suppresses_stop: bool


@dataclass(frozen=True)
class Way:
    """How a receiver is told: seconds, whether of ends, and whether again of what somebody has taken up."""

    wait: int
    interval: int
    repeat: int
    ends: bool = True
    refresh: bool = False


WAYS = {
    "ops": Way(10, 60, 600),
    "pager": Way(0, 60, 3600, ends=False),
    "alertmanager": Way(0, 60, 90, refresh=True),
}


@dataclass
class Group:
    """What one receiver is told, and when."""

    way: Way
    heard: dict[str, Heard] = field(default_factory=dict)
    due_ns: int | None = None
    notified_ns: int = 0
    is_open: bool = False
    repeats: int = 0
    notifications: list[Said] = field(default_factory=list)

    def changed(self, name: str, alert: Known, *, told: bool, now_ns: int) -> None:
        """Something is new of an alert; whether that is told, it may know the alert already."""
        if told:
            self.heard.setdefault(name, Heard(alert))
        if name in self.heard:
            self._wake(now_ns)

    def _wake(self, now_ns: int) -> None:
        way = self.way
        at = (
            max(now_ns, self.notified_ns + way.interval * SECOND)
            if self.is_open
            else now_ns + way.wait * SECOND
        )
        self.due_ns = at if self.due_ns is None else min(self.due_ns, at)

    def flush(self, silences: dict[str, int], now_ns: int) -> None:
        """What is due is told; silences are by name, when each ends."""
        if self.due_ns is None or self.due_ns > now_ns:
            return
        told = {one.alert.incident for one in self.heard.values() if one.firing and not one.is_untold}
        for one in self.heard.values():
            one.joins = one.alert.incident in told and not self.way.refresh
        loud = {name: one for name, one in self.heard.items() if name not in silences}
        news = [name for name, one in loud.items() if one.is_news]
        over = [name for name, one in loud.items() if one.is_over]
        lasting = [name for name, one in loud.items() if one.lasts or one.is_joined]
        ends = over if self.way.ends else []
        again = any(self.way.refresh or not loud[name].alert.acknowledged for name in lasting)
        if news or ends:
            self._tell(news + lasting, ends, 0, now_ns)
            told_of = news + lasting
        elif again and now_ns >= self.notified_ns + self.way.repeat * SECOND:
            self._tell(lasting, [], self.repeats + 1, now_ns)
            told_of = lasting
        else:
            told_of = []
        for name in told_of:
            loud[name].times, loud[name].firing = loud[name].alert.times, True
        for name in over:
            loud[name].firing = False
        self._schedule(silences, now_ns)
        self.heard = {name: one for name, one in self.heard.items() if one.fires or one.is_news or one.firing}

    def _tell(self, firing: list[str], over: list[str], repeats: int, now_ns: int) -> None:
        self.notified_ns, self.repeats = now_ns, repeats
        said = [(name, "firing", self.heard[name].alert.acknowledged) for name in firing]
        said += [(name, "resolved", self.heard[name].alert.acknowledged) for name in over]
        status = "firing" if firing else "resolved"
        self.notifications.append((status, tuple(sorted(said)), repeats, now_ns))

    def _schedule(self, silences: dict[str, int], now_ns: int) -> None:
        moments = []
        self.is_open = False
        for name, one in self.heard.items():
            self.is_open |= one.lasts or one.is_joined or (one.is_over and name not in silences)
            if name in silences:
                if one.matters:
                    moments.append(silences[name])
            elif one.is_over:
                moments.append(self.notified_ns + self.way.interval * SECOND)
            elif (one.lasts or one.is_joined) and (self.way.refresh or not one.alert.acknowledged):
                moments.append(self.notified_ns + self.way.repeat * SECOND)
        self.due_ns = max(now_ns, min(moments)) if moments else None


@dataclass
class Life:
    """All of it."""

    now_ns: int
    attempt: str = "a0"
    step: int = -1
    keep: dict[str, int] = field(default_factory=lambda: dict(KEEP))
    watched: dict[str, Watched] = field(default_factory=lambda: {name: Watched() for name in NAMES})
    known: dict[str, Known] = field(default_factory=lambda: {name: Known() for name in NAMES})
    groups: dict[str, Group] = field(default_factory=lambda: {name: Group(way) for name, way in WAYS.items()})
    silences: list[Mute] = field(default_factory=list)
    allowed: bool = False
    stops: list[tuple[str, str]] = field(default_factory=list)
    onsets: dict[str, set[Onset]] = field(default_factory=dict)
    replacements: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))

    def judge(self, rows: list[frozenset[str]]) -> None:
        """Steps that arrive together; of each, the names that are bad."""
        changed: set[str] = set()
        began: set[str] = set()
        for step, bad in enumerate(rows, self.step + 1):
            for name in NAMES:  # the source before its target
                self._step(name, step, name in bad, changed, began)
        self.step += len(rows)
        for name, alert in self.known.items():
            watched = self.watched[name]
            if alert.firing and not watched.firing and not watched.bad and self.step >= alert.step:
                alert.firing = (
                    False  # of an earlier attempt or rule config, and this one came past it without
                )
                changed.add(name)
        for alert in self.known.values():
            if alert.times:
                alert.incident = self._incident(alert)
        for name in changed.intersection(TOLD):
            alert = self.known[name]
            told = (alert.firing or name in began) and not alert.hidden
            for group in self.groups.values():
                group.changed(name, alert, told=told, now_ns=self.now_ns)

    def _step(self, name: str, step: int, is_bad: bool, changed: set[str], began: set[str]) -> None:
        watched = self.watched[name]
        change = watched.judge(is_bad, HOLD[name], self.keep[name])
        kept_quiet = name == TARGET and self.watched[SOURCE].firing
        if change == "fires":
            onset = (step - watched.bad + 1, (name, self.replacements[name]))
            self.onsets.setdefault(self.attempt, set()).add(onset)
            watched.quiet = kept_quiet
            self._fires(name, step, began)
            changed.add(name)
        elif change == "resolved":
            watched.quiet = False
            if self._resolved(name):
                changed.add(name)
        elif watched.firing and watched.quiet and not kept_quiet:
            watched.quiet = False
            self._fires(name, step, began)
            changed.add(name)

    def _fires(self, name: str, step: int, began: set[str]) -> None:
        alert, quiet = self.known[name], self.watched[name].quiet
        if not alert.firing:
            alert.firing, alert.acknowledged = True, False
            alert.times += 1
            alert.hidden = quiet
            began.add(name)
        else:
            if alert.hidden and not quiet:
                began.add(name)  # receivers are told even if it ends before the next notification
            alert.hidden = alert.hidden and quiet  # what is known of stays known
        alert.attempt, alert.step = self.attempt, step
        alert.config = (name, self.replacements[name])
        if name == "loss":
            self.stops.append((self.attempt, self._stop()))

    def _incident(self, alert: Known) -> tuple[str, int]:
        """The incident of the newest onset of an alert: its attempt and first step."""
        incident, first, extended = ("", -1), -1, -1
        members: set[tuple[str, int]] = set()
        for step, config in sorted(self.onsets[alert.attempt]):
            if first < 0 or step > extended + NEAR:
                first, members = step, set()
            if config not in members:
                members.add(config)
                extended = step
            if config == alert.config:
                incident = (alert.attempt, first)
        return incident

    def _stop(self) -> str:
        if not self.allowed:
            return "not_allowed"
        held = self._silences("loss")
        if held and max(held, key=lambda one: one.ends_ns).suppresses_stop:
            return "silenced"
        asked = (self.attempt, "requested") in self.stops
        return "repeated" if asked else "requested"

    def _resolved(self, name: str) -> bool:
        alert = self.known[name]
        if not alert.firing or alert.attempt != self.attempt:
            return False
        alert.firing = False
        return True

    def _silences(self, name: str) -> list[Mute]:
        return [one for one in self.silences if one.name == name and one.ends_ns > self.now_ns]

    def restarts(self) -> None:
        """A new attempt: rules begin anew, alerts go on."""
        self.attempt = f"a{int(self.attempt[1:]) + 1}"
        self.watched = {name: Watched() for name in NAMES}

    def replaced(self, name: str) -> int:
        """A rule config is another: it begins anew, its alert goes on; returns how many clean steps end it now."""
        self.keep[name] = next(keep for keep in REPLACED[name] if keep != self.keep[name])
        self.watched[name] = Watched()
        self.replacements[name] += 1
        return self.keep[name]

    def expires(self, name: str) -> None:
        """All silences of an alert are ended."""
        ended = self._silences(name)
        for one in ended:
            one.ends_ns = self.now_ns
        for group in self.groups.values():
            if ended and group.heard:
                group.due_ns = self.now_ns

    def withdraws(self, name: str) -> None:
        """Who has taken an alert up no longer does."""
        self.known[name].acknowledged = False
        for group in self.groups.values():
            if name in group.heard:
                group.due_ns = self.now_ns

    def sweep(self) -> None:
        """What is due is told."""
        ends = {name: max((one.ends_ns for one in self._silences(name)), default=0) for name in TOLD}
        silences = {name: end for name, end in ends.items() if end}
        for group in self.groups.values():
            group.flush(silences, self.now_ns)
