from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace

from tests.sdk.format.blocks import INFOS
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.tensor_selection import CatalogueCache


@dataclass(frozen=True)
class Followed(TensorInfo):
    """A tensor's description whose end can be seen."""


def catalogue(name: str) -> tuple[TensorInfo, ...]:
    described = vars(replace(INFOS[0], name=name))
    return (Followed(**described),)


def test_a_value_is_made_once_for_a_catalogue_and_a_key() -> None:
    values: CatalogueCache[object] = CatalogueCache()
    first, second = catalogue("a"), catalogue("a")
    entry = values.get(first, "key", object)
    assert values.get(first, "key", object) is entry
    assert values.get(first, "other", object) is not entry
    assert values.get(second, "key", object) is not entry


def test_catalogues_stay_up_to_a_total_size() -> None:
    size = sum(info.memory for info in catalogue("n" * 1000))
    values: CatalogueCache[object] = CatalogueCache(most_bytes=3 * size)
    given = [catalogue("n" * 999 + str(number)) for number in range(5)]
    ends = [weakref.ref(entry[0]) for entry in given]
    for entry in given:
        values.get(entry, "key", object)
    del entry
    given.clear()
    gc.collect()
    assert [end() is not None for end in ends] == [False, False, True, True, True]


def test_a_catalogue_of_more_than_half_the_room_does_not_stay() -> None:
    values: CatalogueCache[object] = CatalogueCache(most_bytes=10_000)
    large = catalogue("n" * 8000)
    end = weakref.ref(large[0])
    assert values.get(large, "key", object) is not values.get(large, "key", object)
    del large
    gc.collect()
    assert end() is None
