"""Values of programs in bundles: what can be stored comes back equal, everything else is named as lost, nothing is executed."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=64)
)
KEYS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.integers() | st.tuples(st.integers())
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> tuple[Any, list[Any]]:
    """Return the value after it was stored as JSON and tensors, and what was lost."""
    from watchstep.pytorch.bundles.values import ValueEncoder, ValueSource, decode

    encoder = ValueEncoder()
    data = json.loads(json.dumps(encoder.encode(value, "value"), allow_nan=False))

    def read(name: str) -> tuple[Any, str]:
        (referenced,) = [each for each in encoder.tensors if each.name == name]
        values = referenced.values
        if isinstance(values, torch.Tensor):
            if not values.numel():
                return np.empty(values.shape, np.uint8), referenced.dtype
            bits = values.contiguous().reshape(-1).view(torch.uint8).numpy()
            kind = {"BF16": "<u2", "F8_E4M3": "u1"}.get(referenced.dtype)
            dtype = np.dtype(kind) if kind else torch.empty(0, dtype=values.dtype).numpy().dtype
            return bits.view(dtype).reshape(values.shape), referenced.dtype
        return values, referenced.dtype

    return decode(data, ValueSource(read, torch.device("cpu"))), encoder.lost


@given(VALUES)
def test_plain_values_come_back_equal_and_with_their_types(value: Any) -> None:
    back, lost = round_trip(value)
    assert not lost
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "bool", "complex64"],
)
def test_tensors_come_back_bit_for_bit(dtype: str) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, 5).to(getattr(torch, dtype)).t()
    back, lost = round_trip({"x": [tensor, tensor[:0], tensor[0, 0]]})
    assert not lost
    for first, second in zip(back["x"], [tensor, tensor[:0], tensor[0, 0]], strict=True):
        assert first.dtype is second.dtype
        assert first.shape == second.shape
        assert bytes(first.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
            second.contiguous().reshape(-1).view(torch.uint8).numpy()
        )


def test_special_numbers_arrays_and_types() -> None:
    value = {
        "nan": math.nan,
        "inf": -math.inf,
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "scalar": np.float32(1.5),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "set": {1, 2},
    }
    back, lost = round_trip(value)
    assert not lost
    assert math.isnan(back["nan"])
    assert back["inf"] == -math.inf
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert float(back["scalar"]) == 1.5
    assert back["dtype"] is torch.bfloat16
    assert back["device"] == torch.device("cpu")
    assert tuple(back["size"]) == (2, 3)
    assert back["set"] == {1, 2}


def test_mappings_and_dataclasses_have_their_entries_as_attributes() -> None:
    @dataclasses.dataclass
    class Batch:
        tokens: torch.Tensor
        length: int

    back, lost = round_trip([Batch(torch.ones(2), 2), collections.UserDict({"labels": 3})])
    assert not lost
    assert back[0].length == 2
    assert back[0].tokens.tolist() == [1.0, 1.0]
    assert back[1].labels == 3
    with pytest.raises(AttributeError, match="the recorded Batch has no 'mask'"):
        _ = back[0].mask


def test_what_has_no_representation_is_lost_and_said_so() -> None:
    from watchstep.pytorch.bundles.values import LostValueError, ValueEncoder, ValueSource, decode

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("executed",))

    encoder = ValueEncoder()
    data = encoder.encode({"fine": 1, "bad": [Malicious()]}, "batch")
    assert [(lost.path, lost.reason) for lost in encoder.lost] == [
        ("batch/bad/0", "values of this type are not stored")
    ]
    with pytest.raises(LostValueError, match="Malicious"):
        decode(data, ValueSource(pytest.fail, torch.device("cpu")))
    assert pickle.PROTO not in json.dumps(data).encode()


@pytest.mark.parametrize(
    ("pattern", "redacted"),
    [("batch/text", True), ("batch/*", True), ("batch", True), ("*/text", True), ("text", False)],
)
def test_redacted_paths_keep_only_their_description(pattern: str, redacted: bool) -> None:
    from watchstep.pytorch.bundles.values import ValueEncoder

    encoder = ValueEncoder([pattern])
    data = encoder.encode({"text": torch.zeros(2, 3)}, "batch")
    assert ("values/0" not in json.dumps(data)) == redacted
    assert bool(encoder.tensors) != redacted


def test_deep_and_recursive_values_end() -> None:
    from watchstep.pytorch.bundles.values import ValueEncoder

    value: list[Any] = []
    value.append(value)
    encoder = ValueEncoder()
    encoder.encode(value, "batch")
    assert encoder.lost[0].reason == "it is nested too deeply"


@pytest.mark.parametrize(
    "data",
    [
        [1],
        {"unknown": 1},
        {"list": 3},
        {"tuple": {"a": 1}},
        {"dict": [[1]]},
        {"dict": [[{"list": []}, 1]]},
        {"tensor": ["x"]},
        {"torch": "torch.nn"},
        {"torch": "torch.load"},
        {"torch": "nonsense"},
        {"bytes": "%%%"},
        {"int": "12x"},
        {"float": "__import__"},
    ],
)
def test_malformed_data_raises_and_executes_nothing(data: Any) -> None:
    from watchstep.pytorch.bundles.values import ValueSource, decode

    with pytest.raises((ValueError, TypeError, RuntimeError)):
        decode(data, ValueSource(pytest.fail, torch.device("cpu")))
