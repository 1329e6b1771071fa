"""The module tree of recorded tensors."""

from __future__ import annotations

from watchstep.format.tensors import TensorInfo
from watchstep.reading.module_tree import module_tree


def info(module: str, order: int, kind: str = "Linear") -> TensorInfo:
    return TensorInfo(f"{module}.weight", ("weights",), "weight", module, kind, order)


def test_modules_precede_those_in_them() -> None:
    tree = module_tree([info("a.x", 0), info("a.y", 1, "Conv2d"), info("b", 2), info("a.x", 3)])
    assert [(each.path, each.parent, each.depth, each.rows) for each in tree] == [
        ("a", None, 0, []),
        ("a.x", 0, 1, [0, 3]),
        ("a.y", 0, 1, [1]),
        ("b", None, 0, [2]),
    ]
    assert [(each.first_row, each.end_row) for each in tree] == [(0, 4), (0, 4), (1, 2), (2, 3)]
    assert [each.module_type for each in tree] == ["", "Linear", "Conv2d", "Linear"]
    assert tree[1].name == "x"


def test_tensors_without_a_module_are_in_none() -> None:
    assert module_tree([TensorInfo("loss", ("losses",), "loss")]) == []


def test_the_depth_is_limited() -> None:
    tree = module_tree([info(".".join("a" * 1000), 0)])
    assert len(tree) == 32
    assert tree[-1].path.count(".") == 999
