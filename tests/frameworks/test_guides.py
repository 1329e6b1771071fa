"""The examples of the guides of JAX and Keras, as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import environment_of, run_python

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
EXAMPLES = {
    guide: re.findall(
        r"```\{ \.python \.no-run \}\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL
    )
    for guide in ("jax", "keras")
}
NEEDED = {"jax": ("optax",), "keras": ("keras", "tensorflow")}


@pytest.mark.parametrize(
    ("guide", "number"), [*(("jax", n) for n in range(3)), *(("keras", n) for n in range(2))]
)
def test_an_example_runs(tmp_path: Path, guide: str, number: int) -> None:
    for module in NEEDED[guide]:
        pytest.importorskip(
            module, reason=f"{module.upper()} IS NOT INSTALLED: its guide is not proven by this run"
        )
    program = tmp_path / "train.py"
    program.write_text(EXAMPLES[guide][number])
    environment = environment_of(tmp_path, JAX_PLATFORMS="cpu", KERAS_BACKEND="tensorflow")
    run_python(program, cwd=tmp_path, env=environment, timeout=120)


def test_every_example_is_run() -> None:
    assert {guide: len(examples) for guide, examples in EXAMPLES.items()} == {"jax": 3, "keras": 2}
