"""Checksums: three implementations with one result, which any changed bit changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import BLOCK, checksum_array
from watchstep.kernels.native_kernel import KIND_OF_WIDTH, MemoryRange
from watchstep.pytorch.kernel import checksum_on_device, checksums

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

sizes = st.one_of(st.integers(0, 40), st.integers(BLOCK - 5, BLOCK + 5), st.integers(0, 5 * BLOCK))
seeds = st.integers(0, 2**32 - 1)


def of_bits(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Elements of any bits, NaN of every payload among them."""
    width = torch.empty((), dtype=dtype).element_size()
    if size == 0:
        return torch.empty(0, dtype=dtype)
    data = np.random.default_rng(seed).integers(0, 256, size * width, np.uint8)
    return torch.from_numpy(data % 2 if dtype == torch.bool else data).view(dtype)


def by_numpy(tensor: Tensor) -> int:
    return checksum_array(tensor.contiguous().view(UNSIGNED[tensor.element_size()]).numpy())


def checksum(tensor: Tensor) -> int:
    return int(checksums([tensor])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(size=sizes, seed=seeds)
def test_all_ways_agree(dtype: torch.dtype, size: int, seed: int) -> None:
    tensor = of_bits(dtype, size, seed)
    found = checksum(tensor)
    assert found == by_numpy(tensor) == int(checksum_on_device(tensor))
    assert 0 <= found < 2**53
    assert int(float(found)) == found


def test_all_ways_agree_beyond_a_slice() -> None:
    tensor = of_bits(torch.float32, 1024 * BLOCK + 70_001, 0)
    assert checksum(tensor) == by_numpy(tensor) == int(checksum_on_device(tensor))


def by_definition(words: list[int]) -> int:
    """As the docstring of `watchstep.kernels.array_kernel` has it."""
    step, every = 0x9E3779B97F4A7C15, 2**64

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % every
        x = (x ^ x >> 27) * 0x94D049BB133111EB % every
        return x ^ x >> 31

    total = len(words) * step
    for block, start in enumerate(range(0, len(words), 1024)):
        numbered = enumerate(words[start : start + 1024])
        products = sum((mixed((j + 1) * step % every) | 1) * (word ^ word >> 16) for j, word in numbered)
        total += mixed((products + (block + 1) * step) % every)
    return mixed(total % every) >> 11


@given(size=sizes, seed=seeds)
def test_checksums_follow_their_definition(size: int, seed: int) -> None:
    """Checksums that other versions of the library gave can be compared."""
    words = np.random.default_rng(seed).integers(0, 2**32, size, np.uint32)
    assert checksum_array(words) == by_definition(words.tolist())
    assert checksum_array(words.view(np.uint16)) == by_definition(words.view(np.uint16).tolist())


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
@given(data=st.data(), size=st.integers(1, 3 * BLOCK), seed=seeds)
def test_a_flipped_bit_shows(dtype: torch.dtype, data: st.DataObject, size: int, seed: int) -> None:
    tensor = of_bits(dtype, size, seed)
    flipped = tensor.clone()
    octets = flipped.view(torch.uint8)
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flipped) != checksum(tensor)


@given(data=st.data(), size=st.integers(2, 3 * BLOCK), seed=seeds)
def test_swapped_elements_show(data: st.DataObject, size: int, seed: int) -> None:
    tensor = of_bits(torch.float32, size, seed)
    first_place, second_place = data.draw(
        st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True)
    )
    order = torch.arange(size)
    order[first_place], order[second_place] = second_place, first_place
    bits = tensor.view(torch.int32)
    assert (checksum(tensor[order]) == checksum(tensor)) == bool(bits[first_place] == bits[second_place])


@given(size=st.integers(BLOCK, 4 * BLOCK), seed=seeds)
def test_swapped_blocks_show(size: int, seed: int) -> None:
    tensor = of_bits(torch.float32, 2 * size, seed)
    assert checksum(torch.cat([tensor[BLOCK : 2 * BLOCK], tensor[:BLOCK]])) != checksum(tensor[: 2 * BLOCK])


@given(size=sizes, zeros=st.integers(1, 2 * BLOCK), seed=seeds)
def test_appended_zeros_show(size: int, zeros: int, seed: int) -> None:
    tensor = of_bits(torch.float16, size, seed)
    assert checksum(torch.cat([tensor, torch.zeros(zeros, dtype=torch.float16)])) != checksum(tensor)


def test_flipped_signs_of_any_two_elements_show() -> None:
    """The key differences that the docstring is least sure of: no two of the fixed keys cancel."""
    signs = torch.zeros(BLOCK)
    found = set()
    for first in range(0, BLOCK, 64):
        for second in range(first + 1, BLOCK):
            signs.zero_()
            signs[first], signs[second] = -0.0, -0.0
            found.add(checksum(signs))
    assert len(found) == sum(BLOCK - 1 - first for first in range(0, BLOCK, 64))


def test_zeros_and_nan_are_distinguished_by_their_bits() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(nans[:1]) != checksum(nans[1:])
    assert math.isnan(float(nans[1]))


def test_strides_do_not_count() -> None:
    """Elements count in the order in which they are read, however they lie."""
    tensor = of_bits(torch.float32, 60, 0).reshape(5, 3, 2, 2)
    last = tensor.to(memory_format=torch.channels_last)
    turned = tensor.reshape(15, 4).t().contiguous().t()
    every_other = torch.stack([tensor.flatten(), tensor.flatten()], 1)[:, 0]
    due = checksum(tensor)
    assert [checksum(view) for view in (last, turned, every_other)] == [due] * 3
    assert [int(checksum_on_device(view)) for view in (last, turned, every_other)] == [due] * 3
    assert checksum_array(np.asfortranarray(tensor.numpy())) == due


@pytest.mark.parametrize("size", [0, 1])
def test_strides_of_next_to_nothing(size: int) -> None:
    tensor = torch.arange(4, dtype=torch.float64).as_strided((size,), (3,))
    assert (
        int(checksum_on_device(tensor))
        == checksum(tensor)
        == checksum(torch.zeros(size, dtype=torch.float64))
    )


def test_parameters_complex_and_no_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    assert checksum(weight) == checksum(torch.ones(4))
    waves = torch.tensor([1 + 2j, 3 - 4j])
    assert checksum(waves) == checksum(torch.view_as_real(waves)) == checksum_array(waves.numpy())
    assert checksums([]).shape == (0,)


def test_objects_have_no_checksum() -> None:
    with pytest.raises(TypeError, match="object"):
        checksum_array(np.array([object()]))


def test_an_unknown_kind_is_refused() -> None:
    kernel = native_kernel.load()
    if kernel is None:
        pytest.skip("the compiled kernel is not built")
    array = np.ones(3, np.float32)
    good = MemoryRange(array.ctypes.data, 3, KIND_OF_WIDTH[4])
    with pytest.raises(ValueError, match="tensor 1 has unknown kind 99"):
        kernel.checksums([good, MemoryRange(array.ctypes.data, 3, 99)])
