"""Skip lists: samples that a training leaves out, as a JSON file that people may read and edit.

Ids are grouped by the class of the dataset that they belong to, because two datasets of one program use the same indices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.format.documents import parse_json
from watchstep.format.samples.samples import SampleBatch, SampleId, plain_id

KIND = "watchstep skip list"
SCHEMA = 1
MAX_BYTES = 64 * 1024 * 1024
"""Maximum size of a file."""

_MAX_MEMORY = 1024 * 1024 * 1024
_HINT = "write it again with 'watchstep skip-list'"


@dataclass(frozen=True)
class SkipList:
    """Samples to leave out.

    Attributes:
        run: the run that trained on them, ``<project>/<run>``; empty if unknown.
        steps: the steps.
        samples: class of the dataset, empty for samples that the program named → ids.
    """

    run: str = ""
    steps: tuple[int, ...] = ()
    samples: Mapping[str, tuple[SampleId, ...]] = field(default_factory=dict)
    _keys: frozenset[int | str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys = frozenset(_key(sample) for ids in self.samples.values() for sample in ids)
        object.__setattr__(self, "_keys", keys)

    def __len__(self) -> int:
        """Number of different samples."""
        return len(self._keys)

    def skips(self, sample_id: Any) -> bool:
        """Return whether a sample is left out.

        Args:
            sample_id: the id as the sampler gives it, or as the program names it in `Hook.samples`: an index, a file name, a pair or a
                dictionary, of any library's types.
        """
        if type(sample_id) is int:
            return sample_id in self._keys
        try:
            return _key(plain_id(sample_id)) in self._keys
        except (TypeError, ValueError):
            return False

    def encode(self) -> bytes:
        """Encode as a file."""
        document = {
            "kind": KIND,
            "schema": SCHEMA,
            "run": self.run,
            "steps": list(self.steps),
            "samples": [{"source": source, "ids": list(ids)} for source, ids in self.samples.items()],
        }
        return json.dumps(document, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, name: str, source: str | None = None) -> SkipList:
        """Parse the result of `encode`.

        Args:
            data: the bytes.
            name: name of the file, for messages.
            source: only samples of datasets of this class; all if None.

        Raises:
            FormatError: the file has another form or version.
            ConfigError: the source is not in the file.
        """
        try:
            document = parse_json(data, _MAX_MEMORY)
            if not isinstance(document, dict) or document.get("kind") != KIND:
                raise FormatError(f"{name} is not a skip list", _HINT)
            if document["schema"] != SCHEMA:
                raise FormatError(
                    f"{name}: schema {document['schema']!r}, this version reads schema {SCHEMA}",
                    "read it with a newer watchstep",
                )
            lists: dict[str, list[SampleId]] = {}
            for group in document["samples"]:
                ids = [plain_id(value) for value in group["ids"]]
                lists.setdefault(str(group["source"]), []).extend(ids)
            samples = {name: tuple(ids) for name, ids in lists.items()}
            run, steps = str(document["run"]), tuple(int(step) for step in document["steps"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{name} is not a skip list ({error!r})", _HINT) from error
        if source is not None and source not in samples:
            raise ConfigError(
                f"{name} has no samples of a dataset {source!r}",
                f"its datasets are {', '.join(map(repr, samples)) or 'none'}",
            )
        return cls(run, steps, samples if source is None else {source: samples[source]})

    @classmethod
    def of_batches(cls, run: str, batches: Iterable[SampleBatch]) -> SkipList:
        """Return the list of all samples of some batches."""
        steps: set[int] = set()
        samples: dict[str, dict[int | str, SampleId]] = {}
        for batch in batches:
            steps.add(batch.step)
            samples.setdefault(batch.source, {}).update({_key(sample): sample for sample in batch.ids})
        ordered = {source: _in_order(found.values()) for source, found in sorted(samples.items())}
        return cls(run, tuple(sorted(steps)), ordered)


def load_skip_list(path: str | os.PathLike[str], source: str | None = None) -> SkipList:
    """Read a skip list.

    Args:
        path: the file, as ``watchstep skip-list`` writes it.
        source: class name of a dataset, to read only its samples; default: all.

    Raises:
        NotFoundError: the file does not exist or cannot be read.
        FormatError: it is no skip list.
        ConfigError: the source is not in the file.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"skip list {file}: {error.strerror}", "check the path") from error
    if len(data) > MAX_BYTES:
        raise FormatError(f"skip list {file} exceeds {MAX_BYTES} bytes", _HINT)
    return SkipList.decode(data, f"skip list {file}", source)


def _in_order(ids: Collection[SampleId]) -> tuple[SampleId, ...]:
    """Return numbers in ascending order, then other ids by their text."""
    numbers = [sample for sample in ids if isinstance(sample, int)]
    others = [sample for sample in ids if not isinstance(sample, int)]
    return (*sorted(numbers), *sorted(others, key=str))


def _key(sample: SampleId) -> int | str:
    """Return a key that is equal for equal ids, whatever reader or library they come from."""
    if isinstance(sample, int):
        return sample
    if isinstance(sample, str):
        return "s" + (sample if sample.isascii() else sample.encode("utf-8", "replace").decode())
    return "j" + json.dumps(sample, sort_keys=True)
