"""How far defaults lie from where they would do harm: ``python -m benchmarks.detection.margins [--seeds 0 …] [--out FILE]``.

Each numeric parameter of each default rule is halved and doubled, alone, and the programs of the part ``tune`` are judged
again: in how many faulty runs the rule is right then, and in how many healthy ones it raises an alarm. What it writes is
in ``docs/margins.json``, from which a table of the docs is made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.detection.own import part_of, programs
from benchmarks.detection.programs import Program
from benchmarks.detection.recording import record
from watchstep import open_run
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig

STEP_SECONDS = 0.001
FACTORS = {"half": 0.5, "twice": 2.0}


@dataclass(frozen=True)
class Varied:
    """A default rule config, and with one parameter changed: ``name`` is ``rule/parameter/factor``, or the rule's."""

    name: str
    config: RuleConfig


def varied() -> Iterator[Varied]:
    """All of them. A value that the parameter does not allow is left out."""
    for config in DEFAULT_RULES:
        yield Varied(config.rule, config)
        for name, field in type(config.parameters).model_fields.items():
            value = config.params.get(name, field.default)
            if type(value) not in (int, float) or value == 0:
                continue
            for word, factor in FACTORS.items():
                given = max(1, round(value * factor)) if type(value) is int else value * factor
                try:
                    changed = RuleConfig.model_validate(
                        {**config.as_data(), "params": {**config.params, name: given}}
                    )
                except ValidationError:
                    continue
                yield Varied(f"{config.rule}/{name}/{word}", changed)


def judged(program: str, seed: int, folder: Path) -> tuple[str, dict[str, int]]:
    """A program, and the step at which each of the configs first fires on it."""
    rows = open_run(record(programs()[program], seed, folder, STEP_SECONDS)).rows()
    held = list(varied())
    outcomes = backtest(rows, [each.config for each in held])
    return program, {
        each.name: outcome.fired[0].step
        for each, outcome in zip(held, outcomes, strict=True)
        if outcome.fired
    }


def counted(results: list[tuple[str, dict[str, int]]], known: dict[str, Program]) -> dict[str, Any]:
    """Runs in which each config is right, and healthy ones in which it fires."""
    right: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    faulty: Counter[str] = Counter()
    for name, fired in results:
        program = known[name]
        faulty.update(program.truth if program.kind == "faulty" else ())
        for config, step in fired.items():
            if program.kind != "faulty":
                alarms[config] += 1
            elif config.partition("/")[0] in program.truth and step >= program.onset:
                right[config] += 1
    return {
        "healthy": sum(known[name].kind != "faulty" for name, _ in results),
        "faulty": dict(sorted(faulty.items())),
        "configs": {each.name: [right[each.name], alarms[each.name]] for each in varied()},
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.detection.margins")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("docs/margins.json"))
    given = parser.parse_args()
    known = {name: program for name, program in programs().items() if part_of(name) == "tune"}
    results = []
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool() as pool:
        for seed in given.seeds:
            look = partial(judged, seed=seed, folder=Path(folder))
            results += list(pool.imap_unordered(look, known))
    found = {"seeds": given.seeds, **counted(results, known)}
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(results)} trainings judged, {given.out} written", file=sys.stderr)


if __name__ == "__main__":
    main()
