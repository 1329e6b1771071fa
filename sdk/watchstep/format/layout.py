"""Layout of the store: all keys that Watchstep writes or reads.

::

    <project>/<run>/run.json
      attempts/<attempt>.json    control.json    launches/<attempt>.json
      stats/<attempt>/<node>/<writer>/<seq>-<first>-<last>.arrow
      tensors/<attempt>/<worker>/<step>-<mode>[-<collection>].safetensors
      samples/<attempt>/<worker>/<seq>-<first>-<last>.samples
      bundles/<attempt>/<worker>/<step>-<reason>.safetensors
      traces/<attempt>/<worker>/<first>-<last>.zip
      flights/<attempt>/<worker>/<first>-<last>.arrow
      end/<attempt>/<worker>.json
      stops/<attempt>/<step>/<worker>-<state>-<at>.json
      journal/<attempt>/<number>.json
      baselines/<attempt>.json    references/<attempt>.json
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from typing_extensions import Self

from watchstep.errors import BadNameError, FormatError
from watchstep.format.tensors import MODES

SCHEMA_VERSION = 3
"""Version of everything below a run's prefix; readers reject all others. Schemas 1 and 2 are of versions before the first release."""

RUN_DOCUMENT = "run.json"
CONTROL_DOCUMENT = "control.json"
SEGMENTS = "stats/"
ATTEMPTS = "attempts/"
LAUNCHES = "launches/"
ENDS = "end/"
CHECKPOINTS = "saved/"
STOPS = "stops/"
SNAPSHOTS = "tensors/"
SAMPLES = "samples/"
BUNDLES = "bundles/"
TRACES = "traces/"
FLIGHTS = "flights/"
JOURNALS = "journal/"
BASELINES = "baselines/"
REFERENCES = "references/"

_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# The patterns below are compiled at their first use: a training process parses no names.
# Numbers have one notation, so that one object has one name: a parsed key formats to the same text.
_NUMBER_PATTERN = r"0|[1-9][0-9]{0,17}"
_SEGMENT = (
    r"stats/(?P<attempt>[^/]+)/(?P<node>[^/]+)/(?P<writer>[^/]+)/"
    rf"(?P<seq>[0-9]{{10}})-(?P<first>{_NUMBER_PATTERN})-(?P<last>{_NUMBER_PATTERN})\.arrow"
)
_SNAPSHOT = (
    rf"tensors/(?P<attempt>[^/]+)/(?P<worker>{_NUMBER_PATTERN})/"
    rf"(?P<step>{_NUMBER_PATTERN})-(?P<mode>{'|'.join(MODES)})(?:-(?P<collection>[^/]+))?\.safetensors"
)
_SAMPLES = (
    rf"samples/(?P<attempt>[^/]+)/(?P<worker>{_NUMBER_PATTERN})/"
    rf"(?P<seq>{_NUMBER_PATTERN})-(?P<first>{_NUMBER_PATTERN})-(?P<last>{_NUMBER_PATTERN})\.samples"
)
BUNDLE_REASONS = ("gate", "alert", "request", "program")
_BUNDLE = (
    rf"bundles/(?P<attempt>[^/]+)/(?P<worker>{_NUMBER_PATTERN})/"
    rf"(?P<step>{_NUMBER_PATTERN})-(?P<reason>{'|'.join(BUNDLE_REASONS)})\.safetensors"
)
_STEPS = rf"(?P<attempt>[^/]+)/(?P<worker>{_NUMBER_PATTERN})/(?P<first>{_NUMBER_PATTERN})-(?P<last>{_NUMBER_PATTERN})"
_SEQ_DIGITS = 10


def check_schema(name: str, schema: int) -> None:
    """Check the schema version of an object.

    Args:
        name: Name of the object, for the message.
        schema: Version in the object.

    Raises:
        FormatError: The version is not `SCHEMA_VERSION`.
    """
    if schema > SCHEMA_VERSION:
        raise FormatError(
            f"{name}: schema {schema}, this version reads schema {SCHEMA_VERSION}",
            "read the run with a newer watchstep",
        )
    if schema < SCHEMA_VERSION:
        raise FormatError(
            f"{name}: schema {schema}, this version reads schema {SCHEMA_VERSION}",
            "read the run with the version that recorded it",
        )


def check_name(kind: str, value: str) -> str:
    """Return ``value`` if it is valid as one part of a key.

    Args:
        kind: Kind of the name for the message ("run", "project", …).
        value: The name: letters, digits, ``.``, ``_`` and ``-``; at most 128; the first a letter or digit.

    Raises:
        BadNameError: The name is invalid. No valid name leaves its prefix.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadNameError(
            f"{kind} name {value!r} cannot be used",
            "use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit, and no '..'",
        )
    return value


def _are_names(*values: str) -> bool:
    return all(_NAME.fullmatch(value) for value in values)


def run_prefix(project: str, run: str) -> str:
    """Prefix of all objects of a run, relative to the store's root, with a closing slash."""
    return f"{check_name('project', project)}/{check_name('run', run)}/"


@dataclass(frozen=True, order=True)
class WriterId:
    """One writer of one attempt; its segments carry contiguous sequence numbers from 0."""

    attempt: str
    node: str
    writer: str

    @property
    def prefix(self) -> str:
        """Prefix of the writer's segments, relative to the run.

        Raises:
            BadNameError: A part of it is invalid.
        """
        attempt, node = check_name("attempt", self.attempt), check_name("node", self.node)
        return f"{SEGMENTS}{attempt}/{node}/{check_name('writer', self.writer)}/"


@dataclass(frozen=True, order=True)
class SegmentKey:
    """Name of one segment: its writer, its sequence number, and its first and last step (inclusive)."""

    writer: WriterId
    seq: int
    first: int
    last: int

    @property
    def path(self) -> str:
        """Key relative to the run."""
        return f"{self.writer.prefix}{self.seq:0{_SEQ_DIGITS}d}-{self.first}-{self.last}.arrow"

    @classmethod
    def parse(cls, path: str) -> SegmentKey:
        """Parse a key relative to the run.

        Raises:
            FormatError: It is not a segment's key.
        """
        match = re.fullmatch(_SEGMENT, path)
        if (
            not match
            or not _are_names(match["attempt"], match["node"], match["writer"])
            or int(match["first"]) > int(match["last"])
        ):
            raise FormatError(
                f"object {path!r} is not a segment", "leave only Watchstep's objects under stats/"
            )
        writer = WriterId(match["attempt"], match["node"], match["writer"])
        return cls(writer, int(match["seq"]), int(match["first"]), int(match["last"]))


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """Name of the object with full tensors of one step of one worker: those of a collection, or a snapshot of weights and gradients.

    Attributes:
        attempt: The attempt.
        worker: The rank.
        step: The step; in modes other than train, the step of the run at which the pass was made.
        mode: The mode.
        collection: The collection; empty for a snapshot.
    """

    attempt: str
    worker: int
    step: int
    mode: str
    collection: str = ""

    @property
    def path(self) -> str:
        """Key relative to the run."""
        collection = f"-{check_name('collection', self.collection)}" if self.collection else ""
        return f"{SNAPSHOTS}{check_name('attempt', self.attempt)}/{self.worker}/{self.step}-{self.mode}{collection}.safetensors"

    @classmethod
    def parse(cls, path: str) -> SnapshotKey:
        """Parse a key relative to the run.

        Raises:
            FormatError: It is not a snapshot's key.
        """
        match = re.fullmatch(_SNAPSHOT, path)
        if not match or not _are_names(match["attempt"], match["collection"] or "snapshot"):
            raise FormatError(
                f"object {path!r} is not a snapshot", "leave only Watchstep's objects under tensors/"
            )
        collection = match["collection"] or ""
        return cls(match["attempt"], int(match["worker"]), int(match["step"]), match["mode"], collection)


@dataclass(frozen=True, order=True)
class SamplesKey:
    """Name of the object with the samples of some steps of one worker.

    Attributes:
        attempt: The attempt.
        worker: The rank.
        seq: Number of its first record. Later records of a worker have larger numbers, also after a restart.
        first: The smallest step.
        last: The largest step.
    """

    attempt: str
    worker: int
    seq: int
    first: int
    last: int

    @property
    def path(self) -> str:
        """Key relative to the run."""
        attempt = check_name("attempt", self.attempt)
        return f"{SAMPLES}{attempt}/{self.worker}/{self.seq}-{self.first}-{self.last}.samples"

    @classmethod
    def parse(cls, path: str) -> SamplesKey:
        """Parse a key relative to the run.

        Raises:
            FormatError: It is not the key of an object with samples.
        """
        match = re.fullmatch(_SAMPLES, path)
        if not match or not _are_names(match["attempt"]) or int(match["first"]) > int(match["last"]):
            raise FormatError(
                f"object {path!r} is not an object with samples",
                "leave only Watchstep's objects under samples/",
            )
        worker, seq, first, last = (int(match[name]) for name in ("worker", "seq", "first", "last"))
        return cls(match["attempt"], worker, seq, first, last)


@dataclass(frozen=True, order=True)
class BundleKey:
    """Name of the bundle of one step of one worker.

    Attributes:
        attempt: The attempt.
        worker: The rank.
        step: The step.
        reason: Why it was taken, one of `BUNDLE_REASONS`.
    """

    attempt: str
    worker: int
    step: int
    reason: str

    @property
    def path(self) -> str:
        """Key relative to the run."""
        attempt = check_name("attempt", self.attempt)
        return f"{BUNDLES}{attempt}/{self.worker}/{self.step}-{self.reason}.safetensors"

    @classmethod
    def parse(cls, path: str) -> BundleKey:
        """Parse a key relative to the run.

        Raises:
            FormatError: It is not a bundle's key.
        """
        match = re.fullmatch(_BUNDLE, path)
        if not match or not _are_names(match["attempt"]):
            raise FormatError(
                f"object {path!r} is not a bundle", "leave only Watchstep's objects under bundles/"
            )
        return cls(match["attempt"], int(match["worker"]), int(match["step"]), match["reason"])


Key = TypeVar("Key", bound="_StepsKey")


@dataclass(frozen=True, order=True)
class _StepsKey:
    """Name of an object about a range of steps of one worker.

    Attributes:
        attempt: The attempt.
        worker: The rank.
        first: The first step.
        last: The last step.
    """

    folder: ClassVar[str]
    ending: ClassVar[str]
    attempt: str
    worker: int
    first: int
    last: int

    @property
    def path(self) -> str:
        """Key relative to the run."""
        attempt = check_name("attempt", self.attempt)
        return f"{self.folder}{attempt}/{self.worker}/{self.first}-{self.last}{self.ending}"

    @classmethod
    def parse(cls, path: str) -> Self:
        """Parse a key relative to the run.

        Raises:
            FormatError: It is not such a key.
        """
        match = re.fullmatch(_STEPS, path.removeprefix(cls.folder).removesuffix(cls.ending))
        if (
            not (path.startswith(cls.folder) and path.endswith(cls.ending) and match)
            or not _are_names(match["attempt"])
            or int(match["first"]) > int(match["last"])
        ):
            raise FormatError(
                f"object {path!r} is not a key of {cls.folder}",
                f"leave only Watchstep's objects under {cls.folder}",
            )
        return cls(match["attempt"], int(match["worker"]), int(match["first"]), int(match["last"]))


class TraceKey(_StepsKey):
    """Name of the object with the operation trace of some steps of one worker."""

    folder, ending = TRACES, ".zip"


class FlightKey(_StepsKey):
    """Name of the object with figures of the steps before a failure of one worker, which no rule judges."""

    folder, ending = FLIGHTS, ".arrow"


def attempt_document(attempt: str) -> str:
    """Key of an attempt's document, relative to the run."""
    return f"{ATTEMPTS}{check_name('attempt', attempt)}.json"


def launch_document(attempt: str) -> str:
    """Key of the document about the process of an attempt, relative to the run."""
    return f"{LAUNCHES}{check_name('attempt', attempt)}.json"


def end_document(attempt: str, worker: int) -> str:
    """Key of the document about the end of an attempt's worker, relative to the run."""
    return f"{ENDS}{check_name('attempt', attempt)}/{worker}.json"


def baseline_document(attempt: str) -> str:
    """Key of the baseline that an attempt is compared with, relative to the run."""
    return f"{BASELINES}{check_name('attempt', attempt)}.json"


def references_document(attempt: str) -> str:
    """Key of the attempts of other runs that an attempt's tensors are compared with, relative to the run."""
    return f"{REFERENCES}{check_name('attempt', attempt)}.json"


def journal_prefix(attempt: str) -> str:
    """Prefix of the parts of an attempt's journal, relative to the run."""
    return f"{JOURNALS}{check_name('attempt', attempt)}/"


def journal_part(attempt: str, number: int) -> str:
    """Key of one part of an attempt's journal, relative to the run."""
    return f"{journal_prefix(attempt)}{number:0{_SEQ_DIGITS}d}.json"
