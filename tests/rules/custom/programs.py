"""Rules that a user might write, and rules that try to escape."""

from __future__ import annotations

from textwrap import indent

from watchstep_rules.config.rule_config import RuleConfig

HEAD = '''
from __future__ import annotations

import ctypes, os, signal, socket, subprocess, sys, threading
import numpy as np
from watchstep.format.block import concatenate
from watchstep.format.statistics import abs_mean
from watchstep_rules import Finding, Needs, Params, Rule, State
from watchstep_rules.rule import finding_at

LIBC = ctypes.CDLL(None, use_errno=True)


def libc(name, *arguments):
    """Call the C library; raise as Python does."""
    result = getattr(LIBC, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
'''

LOUD = (
    HEAD
    + '''

class LoudParams(Params):
    threshold: float = 2.0
    over: int = 3


class LoudState(State):
    judged: int = 0


class Loud(Rule[LoudParams, LoudState]):
    """Fires where the mean magnitude of a series over some steps is over a threshold."""

    name = "loud"
    summary = "a tensor is loud"
    needs = Needs(collections=("gradients",), probes=("update_ratio",))
    merge = "watermark"

    def lookback(self, params):
        return params.over - 1

    def evaluate(self, params, state, context, block, now):
        together = concatenate([context, block])
        size, key = abs_mean(together.statistics), together.series_key()
        findings = []
        for row in range(len(together) - len(block), len(together)):
            near = together.step[: row + 1] > together.step[row] - params.over
            last = np.flatnonzero((key[: row + 1] == key[row]) & near)
            value = float(np.nanmean(np.append(size[last], 0.0)))
            if value > params.threshold:
                message = f"{together.info(row).name} is loud"
                findings.append(
                    finding_at(self.name, together, row, value=value, threshold=params.threshold, message=message)
                )
        return LoudState(judged=state.judged + len(block)), findings
'''
)


ATTACK = (
    HEAD
    + '''

class AttackParams(Params):
    body: str


class Attack(Rule[AttackParams, State]):
    """Runs the code in its parameter; the result is the message of a finding, or the answer."""

    name = "attack"
    summary = "an attack"
    needs = Needs(collections=())
    merge = "per_worker"

    def evaluate(self, params, state, context, block, now):
        names = dict(globals())
        exec(compile(params.body, "<body>", "exec"), names)
        got = names["run"](state)
        if isinstance(got, tuple):
            return got
        return state, [finding_at(self.name, block, 0, value=1.0, threshold=0.0, message=str(got))]
'''
)


def attack(body: str, file: str = "attack.py", seconds: float = 10.0) -> RuleConfig:
    """A rule that does this in ``evaluate``. All of one file's name share a process, those that die want their own."""
    run = "def run(state):\n" + indent(body, "    ") + "\n    return 'nothing'"
    return python(ATTACK, "Attack", file=file, params={"body": run}, seconds=seconds)


def python(source: str, name: str, **params: object) -> RuleConfig:
    return RuleConfig(rule="python", params={"source": source, "class": name, **params})
