"""Block reads of the Triton kernels for tensors of any type: raw bits, and the bits of the same values as float32."""

# Triton's style: many arguments, constants of a kernel in capitals, no Python types, no sets.
# ruff: noqa: ANN001, ANN201, N803, PLR1714, SIM109
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32 = tl.constexpr(0)
FLOAT16 = tl.constexpr(2)
BFLOAT16 = tl.constexpr(3)
FLOAT8_E4M3FN = tl.constexpr(4)
FLOAT8_E5M2 = tl.constexpr(5)
"""Numbers of `watchstep.kernels.native_kernel.KINDS`."""


@triton.jit
def load_block(KIND: tl.constexpr, address, start, end, at, BLOCK: tl.constexpr):
    """Return the raw bits of a block; zero outside the tensor."""
    if KIND == FLOAT32:
        memory = address.to(tl.pointer_type(tl.int32)) + at
    elif KIND == FLOAT8_E4M3FN or KIND == FLOAT8_E5M2:
        memory = address.to(tl.pointer_type(tl.uint8)) + at
    else:
        memory = address.to(tl.pointer_type(tl.uint16)) + at
    lane = tl.arange(0, BLOCK)
    place = tl.multiple_of(memory, 16) + lane
    # A mask that is unknown at compile time prevents wide loads, so complete blocks are loaded without one.
    if (at >= start) & (at + BLOCK <= end):
        raw = tl.load(place)
    else:
        raw = tl.load(place, mask=inside(at, start, end, BLOCK), other=0)
    return raw


@triton.jit
def inside(at, start, end, BLOCK: tl.constexpr):
    """Return which elements of a block are in the tensor."""
    place = at + tl.arange(0, BLOCK)
    return (place >= start) & (place < end)


@triton.jit
def widen(KIND: tl.constexpr, raw):
    """Return the bits of the float32 with the same value."""
    if KIND == FLOAT32:
        bits = raw
    elif KIND == BFLOAT16:
        bits = raw.to(tl.int32) << 16
    elif KIND == FLOAT16:
        bits = raw.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    elif KIND == FLOAT8_E5M2:
        half = (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    else:
        wide = raw.to(tl.int32)
        magnitude = wide & 0x7F
        # Three mantissa bits, bias 7; subnormals are multiples of 2**-9.
        small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        normal = (magnitude << 20) + (120 << 23)
        bits = tl.where(magnitude < 8, small, normal)
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((wide >> 7) << 31)
    return bits
