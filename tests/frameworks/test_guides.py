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


# Examples of JAX share a process, whose imports take longer than they; Keras is recorded once in a process.
@pytest.mark.parametrize(("guide", "numbers"), [("jax", (0, 1, 2)), ("keras", (0,)), ("keras", (1,))])
def test_the_examples_run(tmp_path: Path, guide: str, numbers: tuple[int, ...]) -> None:
    for module in NEEDED[guide]:
        pytest.importorskip(
            module, reason=f"{module.upper()} IS NOT INSTALLED: its guide is not proven by this run"
        )
    for number in numbers:
        (tmp_path / f"train_{number}.py").write_text(EXAMPLES[guide][number])
    program = f"import runpy\nfor n in {numbers}: runpy.run_path(f'train_{{n}}.py', run_name='__main__')"
    environment = environment_of(tmp_path, JAX_PLATFORMS="cpu", KERAS_BACKEND="tensorflow")
    run_python("-c", program, cwd=tmp_path, env=environment, timeout=120)


def test_every_example_is_run() -> None:
    assert {guide: len(examples) for guide, examples in EXAMPLES.items()} == {"jax": 3, "keras": 2}
