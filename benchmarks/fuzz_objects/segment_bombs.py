"""Small segments that claim to be large, or of which every byte is read many times."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import replace

import flatbuffers
import lz4.frame
import numpy as np

from tests.sdk.format.arrow_streams import Streams
from tests.sdk.format.messages import Slots, padded, schema_metadata
from watchstep.format import ipc, segment
from watchstep.format.segment_checks import MAX_ROWS
from watchstep.format.statistics import Histograms

_MANY_ROWS = MAX_ROWS + 1
_MANY_BINS = 33_000_000
_LONG_NAME = 5_000_000
_GIB = 2**30
_SHARED_TEXT = 32 * 1024 * 1024
_SLOTS = 30_000


def segment_bombs(whole: bytes) -> list[bytes]:
    """Segments of few bytes that decode to gigabytes, or whose headers do."""
    return [
        *catalogue_bombs(whole),
        *row_bombs(whole),
        *frame_bombs(whole),
        *fact_bombs(whole),
        *header_bombs(),
        *length_bombs(whole),
    ]


def catalogue_bombs(whole: bytes) -> list[bytes]:
    """Segments whose catalogue unpacks to very much, or to very many values."""
    streams = Streams.read(whole)
    (first, *_) = json.loads(zlib.decompress(base64.b64decode(streams.metadata[b"watchstep.tensors"])))
    texts = [
        *(b"[" + b" " * (spaces * 1024 * 1024) + b"]" for spaces in (64, 512)),
        b"[" * 200_000 + b"]" * 200_000,
        b"[" + b"[]," * 5_000_000 + b"[]]",
        b"[" + b'{"a":1},' * 2_000_000 + b"{}]",
        json.dumps([{**first, "name": "n" * _LONG_NAME}]).encode(),
    ]
    packed = (base64.b64encode(zlib.compress(text, 9)) for text in texts)
    return [streams.with_metadata(watchstep__tensors=catalogue).encode() for catalogue in packed]


def row_bombs(whole: bytes) -> list[bytes]:
    """Segments of more rows, columns or bins than are read, all alike."""
    first = segment.decode(whole, "whole").take(np.zeros(1, np.intp))
    bombs = []
    for rows, probes, bins in ((_MANY_ROWS, 0, 0), (MAX_ROWS, 64, 0), (1, 65, 0), (1, 0, _MANY_BINS)):
        block = first.take(np.zeros(rows, np.intp))
        offsets = np.zeros(rows + 1, np.int64)
        offsets[-1] = bins
        histogram = Histograms(offsets, np.zeros(bins, np.int16), np.ones(bins, np.int64))
        block = replace(block, statistics=replace(block.statistics, histogram=histogram))
        bombs.append(
            segment.encode(replace(block, probes={f"p{number}": np.zeros(rows) for number in range(probes)}))
        )
    return bombs


def frame_bombs(whole: bytes) -> list[bytes]:
    """Segments in which one column is an LZ4 frame of a gibibyte, with a true claim and with that of its rows."""
    size = 8 * segment.read_header(whole, "whole").rows
    frames = [
        lz4.frame.compress(bytes(_GIB), **options)
        for options in (
            {},
            {"store_size": False, "block_checksum": True, "block_size": lz4.frame.BLOCKSIZE_MAX4MB},
        )
    ]
    pieces = [claim.to_bytes(8, "little") + frame for claim in (size, _GIB) for frame in frames]
    return [with_last_column(whole, piece) for piece in pieces]


def with_last_column(whole: bytes, piece: bytes) -> bytes:
    """The segment with other bytes as the column at the end of its rows."""
    batch = segment.read_header(whole, "whole").batch
    offset, length = max(batch.parts)
    body = piece + bytes(-len(piece) % 8)
    header, size = whole[: batch.body], offset + len(body)
    for before, after in (
        (struct.pack("<qq", offset, length), struct.pack("<qq", offset, len(piece))),
        (struct.pack("<q", batch.end - batch.body), struct.pack("<q", size)),
    ):
        assert header.count(before) == 1
        header = header.replace(before, after)
    return header + whole[batch.body : batch.body + offset] + body + whole[batch.end :]


def fact_bombs(whole: bytes) -> list[bytes]:
    """Segments whose rows and bins are not there, with facts whose checksum is right."""
    streams = Streams.read(whole)
    claims = [{"histogram_values": claim} for claim in (2**24, 2**31, 2**62, 10**300)]
    claims += [{"histogram_bytes": claim} for claim in (2**31, 2**62, 10**300, -1)]
    return [streams.encode(stated=claim) for claim in claims]


def header_bombs() -> list[bytes]:
    """Headers in which texts and slots of tables are shared, so that they are larger once they are read."""

    def pairs(builder: flatbuffers.Builder) -> list[Slots]:
        text = builder.CreateString(b"v" * _SHARED_TEXT)
        keys = [builder.CreateString(f"k{number}") for number in range(16)]
        return [{0: ("offset", key), 1: ("offset", text)} for key in keys]

    return [
        padded(schema_metadata(pairs=pairs)),
        padded(schema_metadata([{_SLOTS: ("Uint8", 1)}] * 256)),
        padded(schema_metadata([{}] * 20_000)),
    ]


def length_bombs(whole: bytes) -> list[bytes]:
    """Segments with a number that claims very much instead of each other one of the two headers."""
    _, first = ipc.message_end(whole, 0)
    _, end = ipc.message_end(whole, first)
    return [
        whole[:place] + struct.pack("<I", claim) + whole[place + 4 :]
        for place in (*range(0, 8, 4), *range(first, end, 4))
        for claim in (2**31 - 8, 2**32 - 8)
        if whole[place : place + 4] != bytes(4)
    ]
