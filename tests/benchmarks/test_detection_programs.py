"""The benchmark's own programs: that they train, have twins and sources, and are fixed in their parts."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection.detecting import judged
from benchmarks.detection.fixed_clock import EnoughStepsError, FixedClock
from benchmarks.detection.healthy import PROGRAMS as HEALTHY
from benchmarks.detection.oracle import SEEDS
from benchmarks.detection.own import TUNE, part_of, programs
from benchmarks.detection.published import PROGRAMS as PUBLISHED
from benchmarks.detection.published.pairs import FIXED, MEASURED, measured
from benchmarks.detection.recording import record
from benchmarks.detection.scoring import SYMPTOMS
from benchmarks.detection.witness import Witness
from watchstep import open_run

FAULTY = [name for name, program in PUBLISHED.items() if program.kind == "faulty"]
STEPS = 3


@pytest.mark.parametrize("name", programs())
def test_each_trains(name: str) -> None:
    witness = Witness()
    clock = FixedClock(0.001, STEPS)
    with pytest.raises(EnoughStepsError):
        programs()[name].train(witness, 0, clock)
    assert len(witness.seen.loss) == STEPS or name == "adversarial_moons"


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_program_has_a_twin_a_source_and_symptoms_that_are_scored(name: str) -> None:
    faulty, fixed = PUBLISHED[name], PUBLISHED[name + FIXED]
    assert faulty.source
    assert faulty.fault
    assert faulty.truth
    assert faulty.truth <= set(SYMPTOMS)
    assert faulty.also <= set(SYMPTOMS) - faulty.truth
    assert fixed.kind == "fixed"
    assert not fixed.truth


@pytest.mark.parametrize("name", FAULTY)
def test_the_oracle_saw_the_truth_of_every_seed(name: str) -> None:
    seen = measured_by_seed()[name]
    assert set(seen) == {str(seed) for seed in SEEDS}
    for symptoms in seen.values():
        assert PUBLISHED[name].truth <= set(symptoms)
    assert set(measured()[name]) == PUBLISHED[name].truth | PUBLISHED[name].also


def measured_by_seed() -> dict[str, dict[str, list[str]]]:
    held: dict[str, dict[str, list[str]]] = json.loads(MEASURED.read_text())
    return held


def test_there_are_enough_of_each() -> None:
    assert len(FAULTY) >= 30
    assert len(PUBLISHED) == 2 * len(FAULTY)
    assert len(HEALTHY) >= 20
    assert all(program.source for program in HEALTHY.values())
    for part in ("tune", "held_out"):
        held = [PUBLISHED[name].truth for name in FAULTY if part_of(name) == part]
        assert frozenset().union(*held) == set(SYMPTOMS)


def test_parts_name_programs_and_keep_twins_together() -> None:
    assert not TUNE - set(programs())
    assert all(part_of(name) == part_of(name + FIXED) for name in FAULTY)


@pytest.mark.parametrize("name", ["dense_regression_nan", "conv_rate_kills_units.fixed"])
def test_the_fixed_clock_makes_a_report_repeatable(name: str, tmp_path: Path) -> None:
    urls = [record(programs()[name], 1, tmp_path / folder, 0.001, 60) for folder in ("one", "two")]
    one, other = (open_run(url).rows() for url in urls)
    assert one.catalogue == other.catalogue
    for column in ("step", "mode", "tensor"):
        assert getattr(one, column).tobytes() == getattr(other, column).tobytes()
    for held, again in (
        (one.statistics, other.statistics),
        (one.statistics.histogram, other.statistics.histogram),
    ):
        for field in fields(held):
            column = getattr(held, field.name)
            if isinstance(column, np.ndarray):
                assert column.tobytes() == getattr(again, field.name).tobytes(), field.name
    assert {name: figures.tobytes() for name, figures in one.probes.items()} == {
        name: figures.tobytes() for name, figures in other.probes.items()
    }
    assert judged(urls[0]) == judged(urls[1])
