from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.tensors import TensorInfo

words = st.text(max_size=6)
infos = st.builds(
    TensorInfo,
    name=words,
    collections=st.lists(words, max_size=3).map(tuple),
    role=words,
    module=words,
    module_type=words,
    order=st.integers(0, 2**31),
    shape=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    dtype=words,
    optimizer=words,
    derived=st.booleans(),
)


@given(infos)
def test_a_description_reads_back(info: TensorInfo) -> None:
    assert TensorInfo.from_data(json.loads(json.dumps(info.as_data()))) == info
    assert TensorInfo.from_data(info.as_data() | {"later": 1}) == info


def test_only_name_collections_and_role_are_needed() -> None:
    assert TensorInfo.from_data({"name": "w", "collections": ["weights"], "role": "weight"}) == TensorInfo(
        "w", ("weights",), "weight"
    )


@pytest.mark.parametrize("lie", [{"shape": [1.5]}, {"order": -1}, {"name": None}, {"derived": "no"}])
def test_lies_are_refused(lie: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError), match="tensor"):
        TensorInfo.from_data({"name": "w", "collections": [], "role": "weight"} | lie)
