"""Ways to bend a whole object."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

Bend = Callable[[random.Random, bytes], bytes]

_LARGE = (0, 1, 0x7F, 0xFF, 2**15 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)


def flipped(dice: random.Random, whole: bytes) -> bytes:
    """Some bits turned, one to sixteen."""
    held = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        held[dice.randrange(len(held))] ^= 1 << dice.randrange(8)
    return bytes(held)


def cut(dice: random.Random, whole: bytes) -> bytes:
    """The beginning only."""
    return whole[: dice.randrange(len(whole))]


def shortened(dice: random.Random, whole: bytes) -> bytes:
    """A piece left out."""
    start = dice.randrange(len(whole))
    return whole[:start] + whole[start + dice.randrange(1, 200) :]


def lengthened(dice: random.Random, whole: bytes) -> bytes:
    """A piece twice, or noise between."""
    start = dice.randrange(len(whole))
    piece = whole[start : start + dice.randrange(1, 200)]
    more = piece if dice.random() < 0.5 else dice.randbytes(dice.randrange(1, 200))
    return whole[:start] + more + whole[start:]


def overwritten(dice: random.Random, whole: bytes) -> bytes:
    """A number that claims much, or nothing, where another stood."""
    held = bytearray(whole)
    width = dice.choice((1, 2, 4, 8))
    start = dice.randrange(max(1, len(held) - width))
    value = dice.choice(_LARGE) & (256**width - 1)
    held[start : start + width] = value.to_bytes(width, dice.choice(("little", "big")))
    return bytes(held)


def bent_at_an_end(dice: random.Random, whole: bytes) -> bytes:
    """The first or last bytes, where sizes stand, made another number."""
    held = bytearray(whole)
    value = struct.pack("<I", dice.choice(_LARGE) & 0xFFFFFFFF)
    start = dice.choice((0, 4, 8, len(held) - 4, len(held) - 8, len(held) - 12))
    if 0 <= start <= len(held) - 4:
        held[start : start + 4] = value
    return bytes(held)


def bent_text(dice: random.Random, whole: bytes) -> bytes:
    """A digit of a number in text made many."""
    places = [place for place in range(len(whole)) if 48 <= whole[place] <= 57]
    if not places:
        return flipped(dice, whole)
    place = dice.choice(places)
    return (
        whole[:place] + dice.choice((b"-1", b"1e308", b"9" * 30, b"null", b"[]", b'"x"')) + whole[place + 1 :]
    )


BENDS: tuple[Bend, ...] = (flipped, cut, shortened, lengthened, overwritten, bent_at_an_end, bent_text)


def safetensors(header: object, body: bytes) -> bytes:
    """A snapshot's bytes with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
