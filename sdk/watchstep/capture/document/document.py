"""A capture document: the fields of a `CaptureConfig` as data, which extend the built-in configuration.

A document sets what differs from the built-in configuration. Under ``collections`` an entry changes the fields that it sets of the
built-in collection with its name, or defines another collection; ``null`` leaves a built-in collection out. Other mappings change the
fields that they set, and lists replace the built-in ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from watchstep.capture.config import (
    ADAPTIVE,
    BUILT_IN,
    PROBES,
    ROLES,
    Bounds,
    Bundles,
    Cadence,
    CaptureConfig,
    Collection,
    Snapshots,
    SystemSampling,
    TensorLimits,
    checked,
    parsed,
    probe_kinds,
)
from watchstep.capture.document.kinds import (
    CaptureProblem,
    Field,
    Flag,
    InvalidValueError,
    ListOf,
    MapOf,
    Number,
    OrNull,
    Pattern,
    Place,
    Range,
    Reference,
    Section,
    Size,
    Text,
    Whole,
    Word,
    check_mapping,
    listed,
    matches_of,
    shown,
)
from watchstep.errors import ConfigError
from watchstep.format.tensors import MODES

DIALECT = "https://json-schema.org/draft/2020-12/schema"

SMALLEST_TENSOR_MEMORY = 64
"""Memory that the smallest tensor takes: it is aligned to this size."""

_LONGEST_SECONDS = 1e9


def _check_cadence(values: Mapping[str, Any], place: Place) -> None:
    start, stop = values["start"], values["stop"]
    if stop is not None and stop <= start and not values["steps"]:
        raise place.child("stop").reject(
            f"{stop} is not after start {start}: due at no step", "use a larger stop, or leave it out"
        )


def _check_collection(values: Mapping[str, Any], place: Place) -> None:
    tensors = values["tensors"]
    if tensors is not None and tensors.every is None and not tensors.steps:
        raise place.child("tensors.every").reject(
            "null without steps: tensors are saved at no step",
            "use a number of steps, such as 100, or add 'steps'",
        )


_STEPS = ListOf(Whole(), "[0, 1, 10]")
_MODES = ListOf(Word(MODES, "mode"), "[train, eval]")

CADENCE = Section(
    Cadence,
    {
        "every": Field(
            OrNull(Whole(1, "use a number of steps from 1, or null")),
            "Number of steps between measurements. null: as often as the overhead budget allows; for tensors: only at 'steps'.",
        ),
        "start": Field(Whole(), "First step."),
        "stop": Field(OrNull(Whole()), "First step that is excluded. null: no end."),
        "steps": Field(_STEPS, "Additional steps, inside or outside of start and stop."),
        "modes": Field(_MODES, "Only in these modes. Empty: in all."),
    },
    check=_check_cadence,
    short="every",
    always=("every",),
)
_CADENCE = Reference("Cadence", CADENCE)

_MODE_CADENCES: dict[str, str] = {
    mode: f"Cadence in mode {mode}, in {'steps' if mode == 'train' else 'forward passes of this mode'}. Default: that of 'cadence'."
    for mode in MODES
}

TENSOR_LIMITS = Section(
    TensorLimits,
    {
        "ring_bytes": Field(
            OrNull(Size(1)),
            "Size on the store. Beyond it the oldest object of the collection is deleted. null: all are kept.",
        ),
        "hour_bytes": Field(OrNull(Size(1)), "Size that is written within an hour. null: no limit."),
        "rows": Field(
            OrNull(Range()),
            "Part of the first dimension (examples, tokens) of activations, inputs, outputs, labels and custom tensors that is saved. null: all.",
        ),
        "channels": Field(OrNull(Range()), "The same for the second dimension."),
    },
)

COLLECTION = Section(
    Collection,
    {
        "cadence": Field(
            OrNull(_CADENCE),
            "When its tensors are measured. null: never, for full tensors only. Default of a custom collection: as often as the overhead budget allows.",
        ),
        "modes": Field(
            MapOf(_MODE_CADENCES, "mode", OrNull(_CADENCE)),
            "Cadences for other modes. null: not measured in that mode.",
        ),
        "tensors": Field(OrNull(_CADENCE), "When its tensors are saved in full. null: never."),
        "tensor_limits": Field(
            Reference("TensorLimits", TENSOR_LIMITS), "Limits of the full tensors of the collection."
        ),
        "include": Field(
            OrNull(Pattern()),
            "Only tensors with names that this regular expression (RE2 syntax) matches from the start.",
        ),
        "exclude": Field(
            OrNull(Pattern()),
            "Excludes names that this regular expression (RE2 syntax) matches from the start.",
        ),
        "modules": Field(
            ListOf(Text(), "[encoder, head.0]"), "Only tensors of modules at these paths, or below them."
        ),
        "module_types": Field(
            ListOf(Text(), "[Linear, LayerNorm]"),
            "Only tensors of modules of these classes, by name, or of their subclasses.",
        ),
        "roles": Field(ListOf(Word(ROLES, "role"), "[weight, gradient]"), "Only tensors with these roles."),
    },
    check=_check_collection,
    nested="cadence",
    nested_keys=tuple(key for key in CADENCE.fields if key != "modes"),
)


class _Probe:
    """A name of a probe, which may have arguments."""

    def read(self, value: Any, place: Place) -> str:
        names = (*PROBES, *probe_kinds())
        try:
            if not isinstance(value, str) or (value not in PROBES and parsed(value) is None):
                raise place.reject(f"{shown(value)} is not a probe", matches_of(value, names))
        except ConfigError as error:
            raise place.reject(error.what, error.hint) from None
        return value

    def write(self, value: Any) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        arguments = "|".join(probe_kinds())
        return {"anyOf": [{"enum": list(PROBES)}, {"type": "string", "pattern": f"^({arguments})(:.*)?$"}]}


class _Collections:
    """The collections by name, over those of the built-in configuration."""

    def read(self, value: Any, place: Place) -> dict[str, Collection]:
        check_mapping(value, place)
        collections = dict(CaptureConfig().chosen)
        valid = True
        for name, entry in value.items():
            try:
                read = self._read_one(name, entry, place.child(name))
            except InvalidValueError:
                valid = False
                continue
            collections.pop(name, None)
            if read is not None:
                collections[name] = read
        if not valid:
            raise InvalidValueError
        return collections

    def _read_one(self, name: Any, entry: Any, place: Place) -> Collection | None:
        if not isinstance(name, str):
            raise place.reject(f"the name {shown(name)} is not text", "put the name in quotes")
        if entry is None:
            if name not in BUILT_IN:
                raise place.reject(
                    "null, but no built-in collection has this name", matches_of(name, BUILT_IN)
                )
            return None
        collection: Collection = COLLECTION.read_over(entry, place, _base_of(name))
        try:
            checked({name: collection})
        except ConfigError as error:
            raise place.reject(error.what, error.hint) from None
        return collection

    def write(self, value: Any) -> Any:
        collections: Mapping[str, Collection] = value
        built_in = CaptureConfig().chosen
        data: dict[str, Any] = {name: None for name in built_in if name not in collections}
        for name, collection in collections.items():
            fields = COLLECTION.write_over(collection, _base_of(name))
            if fields or name not in built_in:
                data[name] = fields
        return data

    def schema(self) -> dict[str, Any]:
        entry = {"$ref": "#/$defs/Collection"}
        built_in = {"anyOf": [entry, {"type": "null"}], "description": "Built in. null leaves it out."}
        return {
            "type": "object",
            "properties": dict.fromkeys(BUILT_IN, built_in),
            "additionalProperties": entry,
        }


def _base_of(name: str) -> Collection:
    return CaptureConfig().chosen.get(name, Collection(ADAPTIVE))


_SECONDS = Number(least=0, most=_LONGEST_SECONDS)

SNAPSHOTS = Section(
    Snapshots,
    {
        "at_gate": Field(Flag(), "Whether the first bad step of a series is saved, at most twice."),
        "memory_bytes": Field(Size(), "Memory for all snapshots and full tensors together."),
    },
)
BUNDLES = Section(
    Bundles,
    {
        "at_gate": Field(Flag(), "Whether the first bad step of a series is bundled, at most twice."),
        "limit_bytes": Field(Size(), "Largest bundle."),
        "reference_bytes": Field(Size(), "Memory of earlier micro-batches of a step that stays referenced."),
        "buffer_bytes": Field(Size(), "Memory for copies of the model's buffers."),
        "redact": Field(ListOf(Text(), "[program/argv]"), "Patterns of what is left out."),
    },
)
SYSTEM = Section(
    SystemSampling,
    {
        "seconds": Field(Number(least=0.01, most=_LONGEST_SECONDS), "Interval between samples."),
        "row_seconds": Field(
            Number(least=0.01, most=_LONGEST_SECONDS), "Interval that becomes one row of each figure."
        ),
        "share": Field(Number(above=0, most=1), "Share of one CPU that sampling may take."),
        "gpus": Field(Flag(), "Whether NVIDIA GPUs are sampled too."),
    },
)
BOUNDS = Section(
    Bounds,
    {
        "queue_bytes": Field(Size(), "Size of statistics that wait to be encoded."),
        "backlog_bytes": Field(Size(), "Size of encoded objects in memory that wait for the store."),
        "backlog_seconds": Field(_SECONDS, "How long they wait in memory while the store refuses."),
        "spill_bytes": Field(Size(), "Size of encoded objects on disk that wait for the store."),
        "flush_seconds": Field(_SECONDS, "How long statistics wait in the first minute."),
        "control_seconds": Field(
            _SECONDS, "Interval of reading the control document when no service answers."
        ),
        "close_seconds": Field(_SECONDS, "Time limit for waiting for the store on close."),
        "term_seconds": Field(_SECONDS, "Time limit for delaying a SIGTERM to write what is left."),
        "checkpoint_seconds": Field(_SECONDS, "Time limit of a stop for waiting for a checkpoint."),
        "sample_bytes": Field(Size(), "Size on disk of the ids of the samples of the last steps. 0: none."),
        "sample_steps": Field(Whole(), "Number of steps whose samples are recorded."),
        "stall_seconds": Field(
            _SECONDS,
            "Least time without the end of a step after which a thread that does not move is reported. 0: never.",
        ),
    },
)


def _check_config(values: Mapping[str, Any], place: Place) -> None:
    memory = values["snapshots"].memory_bytes
    saves = any(collection.tensors is not None for collection in values["collections"].values())
    if saves and memory < SMALLEST_TENSOR_MEMORY:
        raise place.child("snapshots.memory_bytes").reject(
            f"{memory} bytes are too few for any tensor, and collections save tensors",
            f"use {SMALLEST_TENSOR_MEMORY} or more, or remove 'tensors' from the collections",
        )


DOCUMENT = Section(
    CaptureConfig,
    {
        "collections": Field(
            _Collections(),
            "Collections by name. They extend the built-in collections; null leaves a built-in collection out.",
        ),
        "overhead_budget": Field(
            OrNull(Number(above=0, most=1)),
            "Share of the program's own time that recording may take. null: collections without a number of steps are measured at every step.",
        ),
        "allowance_seconds": Field(_SECONDS, "Minimum time that measuring may take of each step."),
        "gate": Field(
            Flag(),
            "Whether NaN and infinity are checked at every step, and everything of a step that has some is measured.",
        ),
        "gradients": Field(
            Word(("after_clipping", "before_clipping"), "choice"),
            "Whether gradients are recorded before or after clipping.",
        ),
        "probes": Field(
            ListOf(_Probe(), "[channels, update_ratio]"), "Additional figures; replaces the list."
        ),
        "token_values": Field(
            ListOf(Whole(None), "[0]"), "Tokens whose share of an embedding's input is recorded."
        ),
        "snapshots": Field(
            Reference("Snapshots", SNAPSHOTS),
            "Snapshots of all weights and gradients, and the memory for full tensors.",
        ),
        "bundles": Field(
            OrNull(Reference("Bundles", BUNDLES)),
            "Bundles of single steps, from which a step is computed again. null: none.",
        ),
        "system": Field(
            OrNull(Reference("SystemSampling", SYSTEM)), "Figures of the process and its machine. null: none."
        ),
        "bounds": Field(Reference("Bounds", BOUNDS), "Limits of the recorder."),
    },
    check=_check_config,
)


def validated(data: Any) -> tuple[CaptureConfig | None, list[CaptureProblem]]:
    """Read the data of a document. Returns the configuration, or None and all problems."""
    place = Place("")
    try:
        config: CaptureConfig = DOCUMENT.read({} if data is None else data, place)
    except InvalidValueError:
        return None, listed(place.problems)
    return config, []


def config_of(data: Any, source: str) -> CaptureConfig:
    """Return the configuration of a document.

    Args:
        data: the data of the document.
        source: its name in messages.

    Raises:
        ConfigError: the data is invalid; the message names the path of the first problem.
    """
    config, problems = validated(data)
    if config is None:
        raise invalid(problems, source)
    return config


def invalid(problems: list[CaptureProblem], source: str) -> ConfigError:
    """Return the error for the problems of a document, which names the first one."""
    first = problems[0]
    more = f" (and {len(problems) - 1} more: 'watchstep check-config FILE' lists all)" if problems[1:] else ""
    return ConfigError(f"{source}: {first}{more}", first.hint)


def document_of(config: CaptureConfig) -> dict[str, Any]:
    """Return the document of a configuration, JSON-ready: what differs from the built-in configuration.

    Raises:
        ConfigError: the configuration cannot be a document: it has a custom clock, or a value that documents do not accept.
    """
    document = changes_of(config)
    if config_of(document, "the configuration as a document") != config:
        raise ConfigError(
            "the configuration as a document: it has a custom clock, which is code",
            "pass the CaptureConfig to Hook instead",
        )
    return document


def changes_of(config: CaptureConfig) -> dict[str, Any]:
    """Return what differs from the built-in configuration, like `document_of`, also for a configuration that cannot be a document."""
    changes: dict[str, Any] = DOCUMENT.write(config)
    return changes


def document_schema() -> dict[str, Any]:
    """The JSON schema of a document, draft 2020-12. ``watchstep check-config`` also checks conditions between fields."""
    definitions = {
        "Bounds": BOUNDS,
        "Bundles": BUNDLES,
        "Cadence": CADENCE,
        "Collection": COLLECTION,
        "Snapshots": SNAPSHOTS,
        "SystemSampling": SYSTEM,
        "TensorLimits": TENSOR_LIMITS,
    }
    return {
        "$schema": DIALECT,
        "title": "Watchstep capture document",
        **DOCUMENT.schema(),
        "$defs": {name: record.schema() for name, record in definitions.items()},
    }


def schema_text() -> str:
    """The text of the published schema."""
    return json.dumps(document_schema(), indent=1, ensure_ascii=False) + "\n"
