"""Histograms are read where a rule of the run looks into them, from the next rows on that it judges."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording, Value, nan_from
from watchstep.errors import ConfigError, FormatError
from watchstep.format import ipc, segment
from watchstep.format.block import Block
from watchstep.format.segment_checks import check_histograms
from watchstep.format.statistics import Histograms
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation import collect
from watchstep_services.runs.rule_configs import put_one

HEADROOM = RuleConfig(rule="number_format_headroom", params={"number_format": "fp16"})


def tiny_from(bad: int) -> Value:
    """Gradients that float16 would make zero, from a step on."""
    return lambda step, name: 1e-30 if step >= bad and name.endswith("gradient") else 1.0


def test_they_are_read_from_when_a_rule_needs_them(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    decode = segment.decode

    def told(data: bytes, name: str, *, histograms: bool = True, **limits: int) -> Block:
        asked.append(histograms)
        return decode(data, name, histograms=histograms, **limits)

    monkeypatch.setattr(segment, "decode", told)
    recording, run_id = Recording(folder_store).begin(), driven.register()
    for seq in range(3):
        driven.announce(run_id, recording.write(seq, 4 * seq, 4 * seq + 3))
        driven.settle(run_id)
    assert asked == [False, False, False]
    with driven.service.database.write() as session:
        put_one(session, session.get_one(RunRow, run_id), HEADROOM)
    for seq in range(3, 5):
        driven.announce(run_id, recording.write(seq, 4 * seq, 4 * seq + 3, tiny_from(16)))
        driven.settle(run_id)
    assert all(asked[3:])
    assert driven.alerts(run_id)["number_format_headroom"][0] == "firing"


def test_segments_with_more_than_recorders_write_are_read_without_them_or_refused(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store).begin()
    key = recording.write(0, 0, 11)
    data = recording.store.get(key.path)
    assert collect.decode(data, key, histograms=True).statistics.histogram.size == 36
    monkeypatch.setattr(collect, "SEGMENT_BINS", 35)
    block = collect.decode(data, key, histograms=True)
    assert (len(block), block.statistics.histogram.size) == (36, 0)
    with pytest.raises(ConfigError, match="were not read"):
        block.statistics.histogram.row(0)
    monkeypatch.setattr(collect, "SEGMENT_ROWS", 35)
    with pytest.raises(FormatError, match="contains 36 rows; at most 35 are read"):
        collect.decode(data, key, histograms=False)


def test_decoding_takes_little_more_than_the_bins() -> None:
    """Also if the rows are not in order, and if another order of them is requested."""
    rows, bins = 2_000, 1_000
    lengths = np.full(rows, bins)
    histogram = Histograms(
        np.concatenate([[0], np.cumsum(lengths)]),
        np.tile(np.arange(bins, dtype=np.int16) - bins // 2, rows),
        np.ones(rows * bins, np.int64),
    )
    order = np.random.default_rng(0).permutation(rows)
    tracemalloc.start()
    try:
        check_histograms(histogram)
        taken = histogram.take(order)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (taken.bins == histogram.bins).all()
    assert peak < histogram.bytes + 24 * 2**20, "the copy, and the indices of a portion"


def test_damage_in_them_that_was_not_looked_at_holds_up_no_other_rule(
    driven: Driven, folder_store: Store
) -> None:
    recording, run_id = Recording(folder_store).begin(), driven.register()
    for seq in range(3):
        key = recording.write(seq, 4 * seq, 4 * seq + 3)
        if seq == 2:
            recording.store.put(key.path, damaged(recording.store.get(key.path)))
        driven.announce(run_id, key)
        driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    with driven.service.database.write() as session:
        put_one(session, session.get_one(RunRow, run_id), HEADROOM)
    driven.announce(run_id, recording.write(3, 12, 15, nan_from(13)))
    driven.settle(run_id)
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    assert set(driven.segments(run_id).values()) == {"read"}


def damaged(data: bytes) -> bytes:
    """A segment in whose histograms one byte is another."""
    start, end = ipc.message_end(data, segment.read_header(data, "s").histograms_at)
    batch = ipc.read_batch(data, *ipc.message_end(data, end), ipc.read_schema(data[start:end]).columns)
    offset, length = batch.parts[-1]
    bent = bytearray(data)
    bent[batch.body + offset + length - 1] ^= 0xFF
    with pytest.raises(FormatError):
        segment.decode(bytes(bent), "s")
    return bytes(bent)
