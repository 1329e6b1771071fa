from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from tests.docs.test_docs import PAGES, ROOT, blocks
from tests.launch.beside import end_service_of
from tests.notebook import Notebook
from tests.processes import run_python
from tests.warmed import warmed
from watchstep import Run, open_run
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES

# The programs in examples/ run as a user runs them, are recorded completely, and raise no alert; their faults raise one.


EXAMPLES = ROOT / "examples"
WITHOUT_FRAMEWORKS = """
import runpy, sys
sys.modules.update(dict.fromkeys(('torch', 'triton', 'jax', 'tensorflow', 'sklearn', 'safetensors')))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""
"""Runs a program as in an environment without the packages that it must not need."""


@dataclass(frozen=True)
class Example:
    """What the run of an example contains.

    Attributes:
        steps: number of training steps.
        evaluations: steps at which a loss in mode eval was recorded.
        losses: names of the training losses.
        falls: whether the last ten values of each loss are less than half of its first value.
        package: a framework without which the example is skipped.
        collections: collections that have tensors.
    """

    file: str
    steps: int
    evaluations: list[int]
    losses: frozenset[str] = frozenset({"loss"})
    falls: bool = True
    ranks: int = 0
    package: str = "torch"
    collections: frozenset[str] = frozenset({"weights", "gradients", "activations", "updates"})


ALL = [
    Example("nanogpt.py", 200, list(range(19, 200, 20))),
    Example("huggingface_trainer.py", 150, list(range(24, 150, 25)), package="transformers"),
    Example("lightning_module.py", 180, list(range(29, 180, 30)), package="lightning"),
    Example("ddp.py", 300, [], ranks=2),
    Example(
        "gan.py",
        400,
        [],
        # `loss` and `loss_2` are found at the two calls of backward().
        frozenset({"discriminator_loss", "generator_loss", "loss", "loss_2"}),
        falls=False,
    ),
    Example(
        "numpy_training.py",
        400,
        [],
        package="numpy",
        collections=frozenset({"weights", "gradients"}),
    ),
]


@dataclass(frozen=True)
class Fault:
    """A fault that an example's docstring describes, and rules that fire.

    Attributes:
        arguments: that introduce it.
        edit: text that is replaced in the program, and by what.
    """

    file: str
    rules: frozenset[str]
    arguments: tuple[str, ...] = ()
    edit: tuple[str, str] | None = None
    ranks: int = 0
    package: str = "torch"


FAULTS = [
    Fault("nanogpt.py", frozenset({"nan_or_inf"}), ("--learning-rate", "30")),
    Fault(
        "huggingface_trainer.py",
        frozenset({"saturated_activation", "vanishing_gradient"}),
        ("--learning-rate", "1"),
        package="transformers",
    ),
    Fault(
        "lightning_module.py",
        frozenset({"weight_not_updating"}),
        ("--learning-rate", "0"),
        package="lightning",
    ),
    Fault("ddp.py", frozenset({"replica_divergence"}), edit=("model(x)", "model.module(x)"), ranks=2),
    Fault(
        "numpy_training.py",
        frozenset({"nan_or_inf"}),
        ("--learning-rate", "3"),
        package="numpy",
    ),
    Fault("gan.py", frozenset({"missing_zero_grad"}), edit=("        generator_optimizer.zero_grad()\n", "")),
]


def execute(ranks: int, package: str, program: Path, folder: Path, *arguments: str) -> tuple[str, Run]:
    """Run a program in a folder; its output, and the run that it printed and recorded."""
    copy = folder / program.name
    copy.write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
    given = ("--store", folder / "runs", *arguments)
    if package == "numpy":
        output = run_python("-c", WITHOUT_FRAMEWORKS, copy, *given, cwd=folder)
    else:
        output = warmed().run(copy, *given, folder=folder, ranks=ranks)
    (url,) = re.findall(r"^run: (\S+)$", output, re.MULTILINE)
    assert url.startswith((folder / "runs" / "default").as_uri())
    assert [path.name for path in folder.iterdir() if path.stem != copy.stem] == ["runs"]
    return output, open_run(url)


def fired(run: Run) -> dict[str, str]:
    """The rules whose alerts fire, with their severities."""
    (attempt,) = backtest_run(run, DEFAULT_RULES).attempts
    assert not [outcome.problem for outcome in attempt.outcomes if outcome.problem]
    return {
        outcome.config.name: str(outcome.config.severity) for outcome in attempt.outcomes if outcome.fired
    }


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            example,
            id=example.file,
            marks=pytest.mark.release if example.package in {"transformers", "lightning"} else pytest.mark.ci,
        )
        for example in ALL
    ],
)
def test_an_example_runs_and_is_healthy(example: Example, tmp_path: Path) -> None:
    pytest.importorskip(example.package)
    output, run = execute(example.ranks, example.package, EXAMPLES / example.file, tmp_path)
    assert len(run.attempts) == 1
    assert run.state() == "completed"
    workers = list(range(example.ranks or 1))
    assert run.workers == workers
    assert run.steps("train") == list(range(example.steps))
    losses = run.losses().to_pylist()
    for name in example.losses:
        for worker in workers:
            values = [
                row["value"]
                for row in losses
                if (row["name"], row["mode"], row["worker"]) == (name, "train", worker)
            ]
            assert len(values) == example.steps
            assert all(map(math.isfinite, values))
            assert not example.falls or max(values[-10:]) < values[0] / 2
    assert {row["name"] for row in losses if row["mode"] == "train"} == example.losses
    assert [row["step"] for row in losses if row["mode"] == "eval"] == example.evaluations
    assert example.collections <= set(run.collections)
    assert {name: severity for name, severity in fired(run).items() if severity != "info"} == {}
    assert "rules that fired, with their first step: none" in output


@pytest.mark.release
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file)
def test_the_fault_of_an_example_fires_its_rule(fault: Fault, tmp_path: Path) -> None:
    pytest.importorskip(fault.package)
    source = (EXAMPLES / fault.file).read_text(encoding="utf-8")
    docstring, quotes, program = source.removeprefix('"""').partition('"""')
    assert all(f"`{rule}`" in docstring for rule in fault.rules)
    assert " ".join(fault.arguments) in docstring
    if fault.edit is not None:
        old, new = fault.edit
        assert f"`{old.strip()}`" in docstring
        assert program.count(old) == 1
        program = program.replace(old, new)
    place = tmp_path / "place"
    place.mkdir()
    faulty = tmp_path / fault.file
    faulty.write_text(f'"""{docstring}{quotes}{program}', encoding="utf-8")
    output, run = execute(fault.ranks, fault.package, faulty, place, *fault.arguments)
    assert fault.rules <= set(fired(run))
    assert all(f"'{rule}': " in output for rule in fault.rules)


@pytest.mark.ci
def test_the_guard_stops_the_training_in_numpy(tmp_path: Path) -> None:
    output, run = execute(0, "numpy", EXAMPLES / "numpy_training.py", tmp_path, "--learning-rate", "3")
    assert "stopped: " in output
    assert "nan_or_inf" in output
    assert run.state() == "stopped"
    assert len(run.steps("train")) < 50
    assert len((EXAMPLES / "numpy_training.py").read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.release
def test_the_notebook_finds_its_nan(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count is not None]
    shown: list[str] = []
    kinds: set[str] = set()
    with Notebook(tmp_path, {"OMP_NUM_THREADS": "1"}).running() as kernel:
        for cell in cells:
            outputs = kernel.run(cell.source)
            assert not [each for each in outputs if each.output_type == "error"], outputs
            data = [each.data for each in outputs if "data" in each]
            shown += [each.get("text/plain", "") for each in data]
            kinds |= {kind for each in data for kind in each}
    (folder,) = (tmp_path / "watchstep-runs" / "default").iterdir()
    run = open_run(folder)
    assert run.state() == "completed"
    assert run.steps("train") == list(range(150))
    assert fired(run)["nan_or_inf"] == "critical"
    table = next(text for text in shown if "nan_or_inf" in text)
    assert re.search(r"nan_or_inf +critical +100 ", table)
    assert "the input contained 1 NaN" in table
    assert "image/png" in kinds  # the plot of the loss
    assert "model:input" in shown[-1]


def test_the_table_of_examples_is_complete() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}}
    assert set(re.findall(r"^\| \[([^\]]+)\]\(\1\) ", readme, re.MULTILINE)) == files
    for fault in FAULTS:
        (row,) = re.findall(rf"^\| \[{re.escape(fault.file)}\].*$", readme, re.MULTILINE)
        assert all(f"`{rule}`" in row for rule in fault.rules)


# Cells of notebooks on pages


@pytest.mark.release
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "ipython")], ids=lambda page: page.name
)
def test_cells_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    said = {"WATCHSTEP_JOBS": str(tmp_path / "jobs"), "CI": "", "WATCHSTEP_QUIET": ""}
    with Notebook(tmp_path, said).running() as notebook:
        notebook.text(blocks(page, "python")[0])
        for cell in blocks(page, "ipython"):
            outputs = notebook.run(cell)
            assert not [each for each in outputs if each.output_type == "error"], outputs
            assert not [each for each in outputs if each.output_type == "stream" and each.name == "stderr"], (
                outputs
            )
    end_service_of(tmp_path / "watchstep-runs")
