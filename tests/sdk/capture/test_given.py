"""Arrays of any kind that a program passes to `hook.record`."""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.processes import run_python
from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Cadence, CaptureConfig, Collection, Hook, Run, open_run
from watchstep.capture.config import TensorLimits

ROW = ["count", "nan", "pos_inf", "neg_inf", "zero", "negative", "min", "max", "abs_min", "mean", "m2", "abs_sum"]  # fmt: skip


class ByArray:
    """An array of a framework that converts by ``__array__``, without newer keywords."""

    def __init__(self, elements: NDArray[Any]) -> None:
        self._array = elements

    def __array__(self) -> NDArray[Any]:
        return self._array


class ByDLPack:
    """An array of a framework that exchanges memory by DLPack only."""

    def __init__(self, elements: NDArray[Any]) -> None:
        self._array = elements

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class Lost:
    """An array on a device that is lost."""

    def __array__(self) -> NDArray[Any]:
        raise RuntimeError("device lost")

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("no such device")

    def __dlpack_device__(self) -> Any:
        return 2, 0


CONVERSIONS: dict[str, Callable[[NDArray[Any]], Any]] = {"a": lambda values: values, "t": torch.from_numpy}


def assert_same_rows(one: Any, other: Any) -> None:
    """All columns, but those of the name and the time."""
    first, second = (tensor.statistics() for tensor in (one, other))
    columns = [name for name in first.column_names if name not in {"tensor", "time_ns"}]
    np.testing.assert_equal(first.select(columns).to_pydict(), second.select(columns).to_pydict())


def one_step(
    folder: Path, values: Mapping[str, Any], config: CaptureConfig = EVERY_STEP, **options: Any
) -> Hook:
    hook = Hook(folder, config=config)
    hook.record(values, **options)
    hook.step()
    hook.close()
    return hook


def row_of(run: Run, name: str) -> dict[str, Any]:
    row: dict[str, Any]
    (row,) = run.tensor(name).statistics().select(ROW).to_pylist()
    return row


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (np.array([1.0, 2.0, 4.0], np.float32), "float32", (3,)),
        ([1.0, 2, 4], "float64", (3,)),
        (np.array([[1, 2, 4]], np.uint64), "uint64", (1, 3)),
        (np.array([1, 2, 4], ">i2"), "int16", (3,)),
        (np.array([1, 2, 4], ">f4"), "float32", (3,)),
        (np.array([1, 9, 2, 9, 4], np.float16)[::2], "float16", (3,)),
        (np.frombuffer(b"\0" + np.array([1.0, 2, 4]).tobytes(), np.float64, offset=1), "float64", (3,)),
        (np.array([[1.0, 2.0, 4.0]]).T, "float64", (3, 1)),
        (np.ma.MaskedArray([1.0, 2, 4, np.nan], [False, False, False, True]), "float64", (4,)),
        (np.array([1 + 2j, 4], np.complex64)[:1].repeat(1), "complex64", (1,)),
        (ByArray(np.array([1.0, 2, 4])), "float64", (3,)),
        (ByDLPack(np.array([1.0, 2, 4])), "float64", (3,)),
        (torch.tensor([1.0, 2, 4], requires_grad=True), "float32", (3,)),
        (memoryview(array.array("q", [1, 2, 4])), "int64", (3,)),
        (np.array([1, 2, 4], np.longdouble), str(np.dtype(np.longdouble)), (3,)),
    ],
)
def test_values_of_every_kind(tmp_path: Path, value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    run = recorded(one_step(tmp_path, {"x": value}))
    info = run.tensor("x").info
    assert (info.dtype, info.shape, info.role, info.collections) == (dtype, shape, "custom", ("custom",))
    row = row_of(run, "x")
    if dtype == "complex64":
        assert (row["count"], row["min"], row["max"]) == (2, 1.0, 2.0)
    else:
        assert (row["count"], row["nan"], row["mean"], row["max"]) == (3, 0, pytest.approx(7 / 3), 4.0)


@pytest.mark.parametrize(("value", "count"), [(3, 1), (2.5, 1), (np.float32(3), 1), (True, 1), ([], 0), (np.zeros((0, 4)), 0)])  # fmt: skip
def test_numbers_and_empty_arrays(tmp_path: Path, value: Any, count: int) -> None:
    row = row_of(recorded(one_step(tmp_path, {"x": value})), "x")
    assert row["count"] == count


def test_a_broadcast_array_is_measured_without_a_copy(tmp_path: Path) -> None:
    row = row_of(
        recorded(one_step(tmp_path, {"x": np.broadcast_to(np.array([1, 3], np.float32), (1 << 40, 2))})), "x"
    )
    assert (row["count"], row["mean"], row["max"]) == (1 << 41, 2.0, 3.0)


def test_the_memory_of_a_read_only_array_may_be_reused(tmp_path: Path) -> None:
    elements = np.ones(8)
    view = elements[:]
    view.flags.writeable = False
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.record(x=view)
    elements[:] = 7
    hook.step()
    assert row_of(recorded(hook), "x")["max"] == 1.0


DTYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_, np.complex64]


@pytest.mark.ci
@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=9))
        ),
        min_size=1,
        max_size=12,
    )
)
def test_arrays_and_tensors_of_the_same_values_have_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, values: list[NDArray[Any]]
) -> None:
    run = recorded(
        one_step(
            tmp_path_factory.mktemp("runs"),
            {
                **{f"array {place}": value for place, value in enumerate(values)},
                **{f"tensor {place}": torch.from_numpy(value.copy()) for place, value in enumerate(values)},
            },
        )
    )
    for place, _ in enumerate(values):
        one, other = run.tensor(f"array {place}"), run.tensor(f"tensor {place}")
        assert (one.info.dtype, one.info.shape) == (other.info.dtype, other.info.shape)
        assert_same_rows(one, other)


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [
        ([0, 1, 2, 2, 1], np.eye(3)[[0, 1, 1, 2, 2]]),
        ([0, 1, 2, 2, -1], np.eye(3, dtype=np.float32)[[0, 1, 1, 2, 2]]),
        ([0, 1, 1], [1, 1, 0]),
        ([[0], [1]], [1, 1]),
        ([0.0, 1.0, 1.0], np.eye(3)),
        ([0, 1, 7], np.eye(3)),
        ([5000, 1], [1, 1]),
        ([True, False], [1, 0]),
    ],
)
def test_arrays_and_tensors_have_the_same_class_counts(tmp_path: Path, labels: Any, outputs: Any) -> None:
    pair = {"labels": np.array(labels), "outputs": np.array(outputs)}
    runs = []
    for folder, convert in CONVERSIONS.items():
        values = {name: convert(value) for name, value in pair.items()}
        hook = Hook(tmp_path / folder, config=EVERY_STEP)
        for _ in range(3):
            for name, value in values.items():
                hook.record({name: value})
            hook.step()
        runs.append(recorded(hook))
    assert runs[0].tensors() == runs[1].tensors()
    for name in runs[0].tensors():
        assert_same_rows(*(run.tensor(name) for run in runs))


def test_probes_of_rules_are_measured_for_arrays_as_for_tensors(tmp_path: Path) -> None:
    config = CaptureConfig(
        overhead_budget=None, system=None, probes=("channel_sum:1", "unchanged:1e-05:1e-08:False")
    )
    images = np.random.default_rng(0).normal(size=(4, 3, 40, 50)).astype(np.float32)
    hook = Hook(tmp_path, config=config)
    for step in range(3):
        batch = images + (step > 1)
        hook.record({"inputs": batch})
        hook.record({"images": torch.from_numpy(batch)}, role="input")
        hook.step()
    run = recorded(hook)
    one, other = (run.tensor(name).statistics() for name in ("inputs", "images"))
    unchanged = "probe.unchanged:1e-05:1e-08:False"
    assert one[unchanged].to_pylist() == other[unchanged].to_pylist() == [0.0, 1.0, 0.0]
    for channel in range(3):
        name = f"probe.channel_sum:1:{channel}"
        assert one[name].to_pylist() == pytest.approx(other[name].to_pylist())


@pytest.mark.parametrize(
    ("role", "collection"),
    [
        ("weight", "weights"),
        ("bias", "biases"),
        ("gradient", "gradients"),
        ("output", "outputs"),
        ("input", "inputs"),
        ("label", "labels"),
        ("loss", "losses"),
        ("custom", "custom"),
    ],
)
@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_a_role_selects_the_built_in_collection(
    tmp_path: Path, role: str, collection: str, make: Any
) -> None:
    info = recorded(one_step(tmp_path, {"x": make(3)}, role=role)).tensor("x").info
    assert (info.role, info.collections, info.module, info.module_type) == (role, (collection,), "", "")


def test_a_role_in_a_collection_of_ones_own(tmp_path: Path) -> None:
    config = CaptureConfig(collections={"mine": Cadence(every=2)}, system=None)
    hook = Hook(tmp_path, config=config)
    for _ in range(5):
        hook.record({"x": np.ones(3)}, role="gradient", collection="mine")
        hook.record({"y": np.ones(3)}, role="gradient")  # its collection is not configured
        hook.step()
    run = recorded(hook)
    assert run.tensors() == ["x"]
    assert (run.tensor("x").info.role, run.tensor("x").steps()) == ("gradient", [0, 2, 4])


def test_an_unknown_role_is_reported(tmp_path: Path) -> None:
    hook = one_step(tmp_path, {"x": np.ones(3)}, role="gradients")
    assert hook.health["faults"]["record 'x'"].startswith(
        "ValueError: role 'gradients': use one of weight, bias, gradient"
    )


def test_a_name_has_one_role(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.record({"w": np.ones(3)}, role="weight")
    hook.record({"w": np.ones(3), "b": np.ones(3)}, role="gradient")
    hook.step()
    hook.close()
    assert "use another name, such as 'w:gradient'" in hook.health["faults"]["record 'w'"]
    run = open_run(hook.run_url)
    assert {name: run.tensor(name).info.role for name in run.tensors()} == {"w": "weight", "b": "gradient"}


BAD: dict[str, Any] = {
    "objects": np.array([1, None]),
    "text": np.array(["a"]),
    "a string": "1.0",
    "bytes": b"1",
    "nothing": None,
    "times": np.array(["2020-01-01"], "M8[D]"),
    "records": np.zeros(2, [("a", "f4")]),
    "ragged": [[1.0], [1.0, 2.0]],
    "a set": {1.0},
    "huge": [10**400],
    "lost": Lost(),
}


def test_bad_values_are_reported_and_do_not_affect_the_others(tmp_path: Path) -> None:
    values: dict[Any, Any] = {
        **BAD,
        7: np.ones(3),
        "\ud800": np.ones(3),
        "": np.ones(3),
        "good": np.ones(3),
    }
    hook = one_step(tmp_path, values)
    assert open_run(hook.run_url).tensors() == ["good"]
    health = hook.health
    assert health["counts"]["faults"] == len(values) - 1
    for name in BAD:
        assert f"record {name!r}" in health["faults"]
    assert "elements of type object is not numeric" in health["faults"]["record 'objects'"]
    assert "a value of type str" in health["faults"]["record 'a string'"]
    assert "device" in health["faults"]["record 'lost'"]


def test_a_name_of_ten_thousand_characters_is_shortened(tmp_path: Path) -> None:
    config = CaptureConfig(
        collections={"custom": Collection(Cadence(), tensors=Cadence())}, overhead_budget=None, system=None
    )
    run = recorded(one_step(tmp_path, {"n" * 10_000: np.ones(3)}, config))
    (name,) = run.tensors("custom")
    assert name.startswith("nnn")
    assert len(name) <= 4096
    assert set(saved(tmp_path)) == {name}


def test_shapes_and_dtypes_may_change(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    for value in (np.ones(4, np.float32), np.ones((2, 3), np.float32), np.ones(5), np.ones(6)):
        hook.record(x=value)
        hook.step()
    run = recorded(hook)
    assert run.tensor("x").statistics()["count"].to_pylist() == [4, 6, 5, 6]
    assert hook.health["counts"]["changed_dtypes"] == 1
    assert hook.health["notes"]["dtypes"] == "'x' changed from float32 to float64 at step 2"


def saved(folder: Path) -> dict[str, NDArray[Any]]:
    return {
        name: elements
        for path in sorted(folder.rglob("*.safetensors"))
        for name, elements in load_file(path).items()
    }


SAVING = CaptureConfig(
    collections={
        "custom": Collection(Cadence(), tensors=Cadence()),
        "gradients": Collection(None, tensors=Cadence()),
        "outputs": Collection(
            None, tensors=Cadence(), tensor_limits=TensorLimits(rows=(1, 3), channels=(0, 2))
        ),
    },
    system=None,
)


def test_full_arrays_are_saved(tmp_path: Path) -> None:
    values = {
        "big endian": np.arange(6, dtype=">f8").reshape(2, 3),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        "transposed": np.arange(6, dtype=np.float16).reshape(2, 3).T,
        "number": np.float32(3),
        "empty": np.zeros((0, 2)),
        "flags": np.array([True, False]),
        "list": [1, 2],
        "complex": np.array([1 + 2j], np.complex64),
        "broadcast": np.broadcast_to(np.array([1, 2], np.float32), (3, 2)),
        "masked": np.ma.MaskedArray([1.0, 2.0], [False, True], fill_value=-1.0),
    }
    hook = Hook(tmp_path, config=SAVING)
    hook.record(values)
    hook.record({"g": np.ones((2, 2))}, role="gradient")
    hook.record({"outputs": np.arange(20.0).reshape(5, 4), "wide": np.array([1], np.longdouble)})
    hook.step()
    hook.close()
    found = saved(tmp_path)
    for name, value in values.items():
        expected = value.filled() if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
        assert found[name].dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], expected)
    np.testing.assert_array_equal(found["g"], np.ones((2, 2)))
    np.testing.assert_array_equal(found["outputs"], [[4, 5], [8, 9]])
    assert "wide" not in found
    assert "wide have a dtype that is not saved" in hook.health["notes"]["tensors of custom"]
    assert not hook.health["faults"]


def test_arrays_and_tensors_are_saved_with_the_same_bytes(tmp_path: Path) -> None:
    for folder, convert in CONVERSIONS.items():
        generator = np.random.default_rng(0)
        hook = Hook(tmp_path / folder, run="r", config=SAVING)
        hook.record({f"x{width}": convert(generator.normal(size=(width, 3))) for width in (1, 7, 100)})
        hook.record(outputs=convert(generator.normal(size=(9, 2, 3)).astype(np.float32)))
        hook.step()
        recorded(hook)
    one, other = (
        [path.read_bytes().partition(b"}}")[2] for path in sorted((tmp_path / folder).rglob("*.safetensors"))]
        for folder in "at"
    )
    assert one == other
    assert len(one) == 2


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4"])
def test_narrow_numbers_of_ml_dtypes(tmp_path: Path, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.array([[1.0, 2.0], [4.0, 4.0]], getattr(ml_dtypes, name))
    hook = one_step(tmp_path, {"x": value, "y": value[:, :1]}, SAVING)
    run = recorded(hook)
    assert run.tensor("x").info.dtype == name
    assert (row_of(run, "x")["count"], row_of(run, "x")["mean"], row_of(run, "y")["max"]) == (4, 2.75, 4.0)
    if name == "int4":
        assert "x, y have a dtype that is not saved" in hook.health["notes"]["tensors of custom"]
        return
    (key,) = run.snapshots()
    assert run.open_snapshot(key).values("x").tolist() == value.astype(np.float32).tolist()


def test_arrays_of_jax(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    value = jax.numpy.arange(6, dtype=jax.numpy.bfloat16).reshape(2, 3)
    deleted = jax.numpy.ones(3)
    deleted.delete()
    hook = one_step(tmp_path, {"x": value, "deleted": deleted, "y": jax.numpy.float32(2)}, SAVING)
    run = open_run(hook.run_url)
    assert (run.tensor("x").info.dtype, row_of(run, "x")["mean"], row_of(run, "y")["mean"]) == (
        "bfloat16",
        2.5,
        2.0,
    )
    assert "deleted" in hook.health["faults"]["record 'deleted'"]


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "triton", "safetensors", "pydantic", "re2", "ml_dtypes")))
import numpy as np, watchstep
with watchstep.Hook(sys.argv[1], run="r") as hook:
    for step in range(5):
        hook.record({"w": np.full((2, 3), step)}, role="weight")
        hook.record(labels=[0, 1, 1], outputs=np.eye(3, 2))
        hook.log(loss=np.float32(1))
        hook.step()
assert not hook.health["faults"], hook.health["faults"]
run = watchstep.open_run(hook.run_url)
assert run.tensor("w").steps()[:3] == [0, 1, 2], run.tensor("w").steps()
assert run.tensor("confusion/1").statistics()["probe.examples"].to_pylist()[:2] == [2.0, 4.0]
assert sys.modules["torch"] is None
"""


@pytest.mark.ci
def test_arrays_need_no_torch(tmp_path: Path) -> None:
    run_python("-W", "error", "-c", WITHOUT_TORCH, tmp_path)


RARE = CaptureConfig(collections={"custom": Cadence(every=1000), "losses": Cadence()}, system=None)


@pytest.mark.parametrize(
    "convert", [np.asarray, torch.tensor, lambda values: torch.tensor(values, requires_grad=True)]
)
def test_a_value_that_becomes_nonfinite_is_measured_at_that_step(tmp_path: Path, convert: Any) -> None:
    with Hook(tmp_path, run="r", config=RARE) as hook:
        for step in range(60):
            values = np.zeros(5, np.float32)
            values[0] = np.nan if step in {20, 21, 22, 40} else step
            hook.record(a=convert(values), b=convert(np.zeros(5, np.float32)))
            hook.step()
    run = recorded(hook)
    assert run.tensor("a").steps() == [0, 20, 40]
    assert run.tensor("b").steps() == [0]
    assert run.tensor("a").statistics()["nan"].to_pylist() == [0, 1, 1]


def test_an_infinity_in_a_large_array_is_found_within_eight_steps(tmp_path: Path) -> None:
    with Hook(tmp_path, run="r", config=RARE) as hook:
        for step in range(100):
            values = np.ones((400, 400), np.float32)
            values[300, 7] = np.inf if step >= 30 else 1.0
            hook.record(a=values)
            hook.step()
    first, found = recorded(hook).tensor("a").steps()
    assert (first, 30 <= found < 38) == (0, True)


def test_without_the_gate_and_in_collections_that_are_not_recorded_nothing_is_checked(tmp_path: Path) -> None:
    off = CaptureConfig(collections={"custom": Cadence(every=1000)}, gate=False, system=None)
    none = CaptureConfig(collections={"losses": Cadence()}, system=None)
    for name, config in (("off", off), ("none", none)):
        with Hook(tmp_path, run=name, config=config) as hook:
            for step in range(30):
                hook.record(a=np.full(3, np.nan if step >= 10 else 1.0))
                hook.step()
        run = recorded(hook)
        assert [step for name in run.tensors("custom") for step in run.tensor(name).steps()] == (
            [0] if name == "off" else []
        )


def test_selectors_choose_among_the_values_that_a_program_passes(tmp_path: Path) -> None:
    config = CaptureConfig(
        collections={
            "weights": Collection(Cadence(), include="w1", tensors=Cadence()),
            "picked": Collection(
                None, include="w", roles=("weight", "custom"), exclude="w3", tensors=Cadence()
            ),
            "mine": Collection(None, tensors=Cadence()),
        },
        system=None,
    )
    with Hook(tmp_path, run="r", config=config) as hook:
        hook.record({"w1": np.ones(2), "w2": np.ones(2), "w3": torch.ones(2)}, role="weight")
        hook.record({"w4": np.ones(2)}, collection="mine")
        hook.step()
    run = recorded(hook)
    assert run.tensors("weights") == ["w1"]
    saved = {key.collection: run.store.get(key.path) for key in run.snapshots()}
    assert {name for name in ("w1", "w2", "w3", "w4") if f'"{name}"'.encode() in saved["picked"]} == {
        "w1",
        "w2",
    }
    assert set(saved) == {"picked", "mine"}  # a tensor of several collections is saved once
    assert b'"w4"' in saved["mine"]
