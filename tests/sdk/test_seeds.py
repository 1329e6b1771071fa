"""`watchstep.seed_all`: what it seeds, also of modules that are imported later, and what is recorded of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import watchstep
from tests.sdk.programs import run_program
from watchstep.errors import ConfigError
from watchstep.reading.run_documents import ATTEMPT, read_documents


def run(program: str, **variables: str) -> Any:
    """The JSON that a program prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, **variables},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LATER = """
import json, random, sys
import watchstep
from watchstep.seeds import recorded_seeds
report = watchstep.seed_all(7, deterministic=True, rank_offset=100)
before = [name in sys.modules for name in ("numpy", "torch")]
numbers = [random.random()]
import torch, numpy
numbers += [torch.rand(1).item(), numpy.random.random()]
print(json.dumps([before, numbers, report.as_data(), recorded_seeds(), torch.are_deterministic_algorithms_enabled(),
    torch.backends.cudnn.deterministic, [type(finder).__name__ for finder in sys.meta_path]]))
"""


@pytest.mark.ci
def test_modules_that_are_imported_later_are_seeded_then() -> None:
    before, numbers, report, recorded, deterministic, cudnn, finders = run(
        LATER, RANK="2", PYTHONHASHSEED="5"
    )
    assert before == [False, False]
    assert numbers == [
        random.Random(207).random(),
        torch.rand(1, generator=torch.Generator().manual_seed(207)).item(),
        np.random.RandomState(207).random_sample(),
    ]
    assert (report["seed"], report["rank"], report["process_seed"]) == (7, 2, 207)
    assert (report["generators"], report["later"]) == (["python"], ["numpy", "torch"])
    assert (sorted(recorded["generators"]), recorded["later"]) == (["numpy", "python", "torch"], [])
    assert (deterministic, cudnn, report["hash_seed"]) == (True, True, "5")
    assert recorded["flags"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert recorded["flags"]["torch.deterministic_algorithms"] == "True"
    assert report["notes"] == []
    assert "_AfterImport" not in finders


IMPORTED = """
import json, os, random
import numpy, torch
import watchstep
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
numbers = []
for _ in range(2):
    report = watchstep.seed_all(7, deterministic=True)
    numbers.append([random.random(), numpy.random.random(), torch.rand(1).item()])
print(json.dumps([numbers, report.as_data()]))
"""


@pytest.mark.ci
def test_imported_modules_are_seeded_at_once_and_what_is_not_deterministic_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    numbers, report = json.loads(run_program(tmp_path, IMPORTED))
    assert numbers[0] == numbers[1]
    assert report["generators"] == ["python", "numpy", "torch"]
    assert report["hash_seed"] == "random"
    workspace, hashes = report["notes"]
    assert workspace.startswith("CUBLAS_WORKSPACE_CONFIG=':0:0' was set before")
    assert hashes.startswith("PYTHONHASHSEED was not set")


WORKERS = """
import json, random, sys
import numpy, torch
from torch.utils.data import DataLoader, Dataset
import watchstep
class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return [index, random.random(), numpy.random.random(), torch.rand(1).item()]
watchstep.seed_all(1)
torch.rand(int(sys.argv[1]))
loader = DataLoader(Numbers(), shuffle=True, num_workers=1, generator=watchstep.data_generator(5), collate_fn=lambda batch: batch)
print(json.dumps([batch[0] for batch in loader]))
"""


@pytest.mark.ci
def test_workers_of_a_loader_draw_the_same_numbers_whatever_else_is_drawn(tmp_path: Path) -> None:
    first, again = (json.loads(run_program(tmp_path, WORKERS, drawn)) for drawn in ("0", "3"))
    assert first == again
    assert len({tuple(row) for row in first}) == 4


RECORDED = """
import sys
import watchstep
store, early = sys.argv[1], sys.argv[2] == "early"
if early:
    watchstep.seed_all(11)
hook = watchstep.Hook(store, run="r")
if not early:
    watchstep.seed_all(12)
hook.log(loss=1.0)
hook.step()
hook.close()
print(hook.health["seeds"]["seed"])
"""


@pytest.mark.parametrize(("when", "seed"), [("early", 11), ("late", 12)])
def test_the_run_says_its_seed(tmp_path: Path, when: str, seed: int) -> None:
    command = [sys.executable, "-c", RECORDED, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{seed}\n"
    recorded = watchstep.open_run(tmp_path / "default" / "r")
    (attempt,) = read_documents(recorded.store, ATTEMPT).documents
    assert attempt.seeds.get("seed") == (seed if when == "early" else None)
    (end,) = recorded.ends()
    assert end.health["seeds"]["seed"] == seed


@pytest.mark.parametrize(
    "arguments",
    [{"seed": -1}, {"seed": 2**32}, {"seed": 1.5}, {"seed": True}, {"seed": 1, "rank_offset": "2"}],
)
def test_an_invalid_seed(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="seed_all"):
        watchstep.seed_all(**arguments)


def test_an_offset_that_makes_a_seed_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="in rank 3"):
        watchstep.seed_all(2**32 - 2, rank_offset=1)


UNSEEDABLE = """
import json, sys
sys.path.insert(0, {folder!r})
import watchstep
from watchstep.seeds import recorded_seeds
watchstep.seed_all(7)
import numpy
later = recorded_seeds()
print(json.dumps([numpy.value, later, watchstep.seed_all(7).as_data()]))
"""


def test_a_module_that_cannot_be_seeded_is_imported_and_noted(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("value = 3\n")
    value, later, at_once = run(UNSEEDABLE.format(folder=str(tmp_path)))
    assert value == 3
    for recorded in (later, at_once):
        assert (recorded["generators"], recorded["later"]) == (["python"], ["torch"])
        assert recorded["notes"][0].startswith("not seeded: numpy: AttributeError")
