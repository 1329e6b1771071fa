"""Which compaction of a run its readers follow: the newest whole one that has not been found damaged."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from watchstep.errors import FormatError, NotFoundError
from watchstep.reading.budget import ReadBudget
from watchstep.reading.manifest import (
    COMPACTED,
    MAX_MANIFEST,
    Manifest,
    decode,
    generation_of,
    manifest_key,
)
from watchstep.reading.parquet_object import Catalogues
from watchstep.reading.part import PartObject
from watchstep.store import Store


@dataclass(frozen=True)
class Compacted:
    """One attempt of the generation that is followed."""

    started_ns: int
    parts: list[PartObject]
    recent: PartObject | None


_MOST_TRIED = 3
"""Manifests that are read at one look. A compaction writes its manifest last and deletes older generations, so that the newest is almost always whole."""


class Generations:
    """The manifest in use, and its attempts.

    Attributes:
        manifest: None where no compaction is followed.
        attempts: attempt → its objects.
    """

    def __init__(self, store: Store, catalogues: Catalogues) -> None:
        self._store = store
        self._catalogues = catalogues
        self._distrusted: set[int] = set()
        self.manifest: Manifest | None = None
        self.attempts: dict[str, Compacted] = {}
        self.sources: frozenset[str] = frozenset()

    def refresh(self, budget: ReadBudget | None = None) -> bool:
        """Look for a newer one; whether another is followed now.

        Of manifests that cannot be read only the newest three are tried; the next look tries the next three.

        Args:
            budget: of the question; looked at between two manifests.

        Raises:
            StoreError: the store cannot be read.
            OverBudgetError: the time is up.
        """
        before = self.manifest and self.manifest.generation
        whole = [
            found[0]
            for entry in self._store.entries(COMPACTED)
            if (found := generation_of(entry.key)) and found[1] == "manifest.json"
        ]
        newest = sorted(set(whole) - self._distrusted, reverse=True)
        for generation in newest[:_MOST_TRIED]:
            if budget is not None:
                budget.check()
            if generation == before or self._follow(generation):
                return generation != before
            self._distrusted.add(generation)
        self.manifest, self.attempts, self.sources = None, {}, frozenset()
        return before is not None

    def distrust(self) -> None:
        """Never follow the present one again."""
        if self.manifest is not None:
            self._distrusted.add(self.manifest.generation)

    def _follow(self, generation: int) -> bool:
        key = manifest_key(generation)
        try:
            manifest = decode(self._store.get(key, limit=MAX_MANIFEST), key)
            attempts = {}
            for held in manifest.attempts:
                catalogue = self._catalogues.read(held.catalogue.encode())
                parts = [PartObject(self._store, part, catalogue, self._catalogues) for part in held.parts]
                recent = None
                if held.recent is not None:
                    recent = PartObject(self._store, held.recent, catalogue, self._catalogues)
                attempts[held.attempt] = Compacted(held.started_ns, parts, recent)
        except (FormatError, NotFoundError, ValueError, TypeError, LookupError, zlib.error):
            return False
        self.manifest, self.attempts, self.sources = manifest, attempts, frozenset(manifest.sources)
        return True
