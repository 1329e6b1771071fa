"""Reference runs: other runs of the project that an attempt is compared with, by statistics or by full tensors.

The service pins the references of an attempt when it evaluates the first rows: the newest attempt of each reference run, and the compared
statistics of all of its rows until then, in an object that never changes. A backtest reads the same object. So the result does not depend on what
the reference run records later. A backtest of a rule that the attempt did not have compares with the reference run as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from watchstep.errors import BadNameError, FormatError, NotFoundError, WatchstepError
from watchstep.format.block import Block
from watchstep.format.documents import parse_json
from watchstep.format.layout import check_name, references_document
from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run, open_run
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.saved_tensors import OpenReference, ReferenceRun, SavedTensors
from watchstep_rules.signals.reference import MOST_POINTS, MOST_TENSORS, Reference, reference_of

_POINTS, _MIN_POINTS = 50_000, 100
"""Steps that are stored of a reference run: in all, and at least of each tensor."""
_MAX_BYTES = 16 * 1024 * 1024
_MAX_MEMORY = 256 * 1024 * 1024
_SECONDS = 20.0
_MEGABYTES = 1024.0
"""Limits of reading the statistics of one reference run."""


@dataclass(frozen=True)
class PinnedReferences:
    """The references of an attempt.

    Attributes:
        attempts: run → its pinned attempt.
        statistics: "run figure" → for each tensor its points, as `reference_of` computes them.
        problems: run → why it cannot be compared with.
    """

    attempts: Mapping[str, str] = field(default_factory=dict)
    statistics: Mapping[str, Reference] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    def has(self, compared: Compared) -> bool:
        """Whether a comparison was pinned, even if the run could not be read."""
        if compared.run in self.problems:
            return True
        return compared.run in self.attempts and (
            not compared.figure or f"{compared.run} {compared.figure}" in self.statistics
        )

    def encode(self) -> bytes:
        """Encode as the object's content."""
        data = {"attempts": self.attempts, "statistics": self.statistics, "problems": self.problems}
        return json.dumps(data, sort_keys=True, default=dict).encode()

    @classmethod
    def decode(cls, data: bytes, key: str) -> PinnedReferences:
        """Decode the object's content. The statistics are validated with the parameters of the rules.

        Raises:
            FormatError: it is not valid.
        """
        try:
            parsed = parse_json(data, _MAX_MEMORY)
            attempts, statistics, problems = (parsed[name] for name in ("attempts", "statistics", "problems"))
            if not all(isinstance(part, dict) for part in (attempts, statistics, problems)):
                raise TypeError("a part is not a mapping")  # noqa: TRY301 - reported like other damage
            for run, attempt in attempts.items():
                check_name("run", run)
                check_name("attempt", attempt)
            return cls(attempts, statistics, {str(run): str(problem) for run, problem in problems.items()})
        except (ValueError, TypeError, KeyError, AttributeError, BadNameError, RecursionError) as error:
            raise FormatError(
                f"object {key} does not contain references ({error})"[:300], "it was damaged; delete it"
            ) from error


@dataclass(frozen=True)
class Compared:
    """What a rule config compares: a run, by the statistic of a name (empty: by full tensors only)."""

    run: str
    figure: str


def compared_by(config: RuleConfig) -> Compared | None:
    """The reference run of a rule config; None if it compares with none, or its parameters contain the statistics.

    A rule whose reference cannot be determined has none here; its evaluation reports why.
    """
    try:
        rule, params = config.implementation, config.parameters
        run = rule.reference(params)
        if not run or (rule.reference_param and config.params.get(rule.reference_param)):
            return None
        return Compared(run, rule.reference_figure(params))
    except Exception:  # noqa: BLE001 - reported by the evaluation, and must not stop other rules
        return None


def pin_references(
    run_store: Store, attempt: str, configs: Iterable[RuleConfig], attempts: Mapping[str, str]
) -> None:
    """Store the references of an attempt, unless they were stored before; does nothing if no rule config compares runs.

    Args:
        run_store: the store of the judged run.
        attempt: its attempt.
        configs: the rule configs.
        attempts: the newest attempt of each run that has one.

    Raises:
        StoreError: the store did not answer.
    """
    compared = _compared(configs)
    if compared:
        references = _read(run_store, compared, attempts)
        encoded = references.encode()
        if len(encoded) > _MAX_BYTES:
            problem = f"the statistics of the reference runs have {len(encoded)} bytes, at most {_MAX_BYTES} are stored"
            encoded = replace(
                references, statistics={}, problems={entry.run: problem for entry in compared if entry.figure}
            ).encode()
        run_store.create(references_document(attempt), encoded)


def read_references(run_store: Store, attempt: str) -> PinnedReferences | None:
    """The pinned references of an attempt; None if none were pinned.

    Raises:
        FormatError: the object is not valid.
        StoreError: the store did not answer.
    """
    key = references_document(attempt)
    try:
        return PinnedReferences.decode(run_store.get(key, limit=_MAX_BYTES), key)
    except NotFoundError:
        return None


def current_references(run_store: Store, configs: Iterable[RuleConfig]) -> PinnedReferences:
    """The references of rule configs as they are now, from the newest attempts of the reference runs.

    Raises:
        StoreError: the store did not answer.
    """
    compared = _compared(configs)
    attempts = {}
    for run in {entry.run for entry in compared}:
        try:
            recorded = open_run(_store_of(run_store, run)).attempts
        except (NotFoundError, FormatError, BadNameError):
            continue  # reported as a run without an attempt
        if recorded:
            attempts[run] = recorded[-1]
    return _read(run_store, compared, attempts)


def references_of(
    run_store: Store, attempt: str, configs: Sequence[RuleConfig]
) -> tuple[PinnedReferences | None, list[str]]:
    """The references of an attempt for a backtest: the pinned ones, and those that were not pinned as they are now.

    Returns:
        The references, None if no rule config compares runs; and differences from the live run.

    Raises:
        StoreError: the store did not answer.
    """
    compared = _compared(configs)
    if not compared:
        return None, []
    notes: list[str] = []
    pinned = None
    try:
        pinned = read_references(run_store, attempt)
    except FormatError as error:
        notes.append(error.what)
    pinned = pinned or PinnedReferences()
    if all(pinned.has(entry) for entry in compared):
        return pinned, notes
    missing = {entry.run for entry in compared if not pinned.has(entry)}
    current = current_references(run_store, configs)
    if found := sorted(missing & current.attempts.keys()):
        notes.append(
            f"run {', '.join(found)} is compared with as it is now, because no references to it were stored when the attempt began"
        )
    notes.extend(_why_absent(run_store, run) for run in sorted(missing - current.attempts.keys()))
    return PinnedReferences(
        {**current.attempts, **pinned.attempts},
        {**current.statistics, **pinned.statistics},
        {**current.problems, **pinned.problems},
    ), notes


def _why_absent(run_store: Store, run: str) -> str:
    """Return why a run has no attempt to compare with."""
    try:
        open_run(_store_of(run_store, run))
    except NotFoundError:
        return f"no run {run} in this project"
    except (FormatError, BadNameError) as error:
        return f"run {run} cannot be compared with: {error.what}"
    return f"run {run} has no attempt to compare with"


def with_references(configs: Sequence[RuleConfig], references: PinnedReferences | None) -> list[RuleConfig]:
    """Add the statistics of reference runs to the parameters of rule configs that compare with them."""
    return [_with_reference(config, references or PinnedReferences()) for config in configs]


def saved_tensors_of(
    run_store: Store, attempt: str, references: PinnedReferences | None = None
) -> SavedTensors:
    """The reader of an attempt's full tensors, and of those of its reference runs.

    Args:
        run_store: the store of the run.
        attempt: the attempt.
        references: its references; by default the pinned ones, which are read when a rule needs them.
    """
    return SavedTensors(run_store, attempt, _opener(run_store, attempt, references))


def _opener(run_store: Store, attempt: str, given: PinnedReferences | None) -> OpenReference:
    @functools.cache
    def references() -> PinnedReferences:
        return given or read_references(run_store, attempt) or PinnedReferences()

    def open_reference(run: str) -> ReferenceRun | None:
        pinned = references().attempts.get(run)
        return None if pinned is None else ReferenceRun(run, pinned, _store_of(run_store, run))

    return open_reference


def _compared(configs: Iterable[RuleConfig]) -> list[Compared]:
    entries = (compared_by(config) for config in configs)
    return sorted(
        {entry for entry in entries if entry is not None}, key=lambda entry: (entry.run, entry.figure)
    )


def _read(run_store: Store, compared: Sequence[Compared], attempts: Mapping[str, str]) -> PinnedReferences:
    statistics: dict[str, Reference] = {}
    problems: dict[str, str] = {}
    for entry in compared:
        if entry.run not in attempts:
            problems[entry.run] = f"run {entry.run!r} has no attempt in this project"
        elif entry.figure:
            try:
                statistics[f"{entry.run} {entry.figure}"] = _statistics(
                    _store_of(run_store, entry.run), entry.figure
                )
            except WatchstepError as error:
                problems[entry.run] = error.what
    names = {entry.run for entry in compared}
    return PinnedReferences(
        {run: attempt for run, attempt in attempts.items() if run in names}, statistics, problems
    )


def _store_of(run_store: Store, run: str) -> Store:
    """The store of another run of the same project.

    Raises:
        BadNameError: the name could leave the project.
    """
    return run_store.sibling(check_name("run", run))


def _statistics(run_store: Store, figure: str) -> Reference:
    """A statistic of the first tensors of a run in the model's order, losses and metrics first.

    Raises:
        NotFoundError, FormatError, OverBudgetError, RuleError: it cannot be read within the limits.
        StoreError: the store did not answer.
    """
    opened = open_run(run_store)
    run = Run(run_store, opened.document, ReadBudget(_SECONDS, _MEGABYTES))
    run.refresh()
    rows = run.rows()
    chosen = _first(rows)
    points = _POINTS // max(1, sum(chosen))
    return reference_of(
        rows.where(rows.mask_of_tensors(chosen)), figure, points=max(_MIN_POINTS, min(MOST_POINTS, points))
    )


def _first(rows: Block) -> list[bool]:
    ranked = sorted(
        range(len(rows.catalogue)),
        key=lambda index: (
            bool(rows.catalogue[index].module),
            rows.catalogue[index].order,
            rows.catalogue[index].name,
        ),
    )
    chosen = set(ranked[:MOST_TENSORS])
    return [index in chosen for index in range(len(rows.catalogue))]


def _with_reference(config: RuleConfig, references: PinnedReferences) -> RuleConfig:
    compared = compared_by(config)
    if compared is None or not config.implementation.reference_param:
        return config
    reference: Any = references.statistics.get(f"{compared.run} {compared.figure}")
    if reference is None:
        return config
    compared_config = config.model_copy(
        update={"params": {**config.params, config.implementation.reference_param: reference}}
    )
    try:
        _ = compared_config.parameters  # of an object on the store, which may be damaged
    except ValueError:
        return config  # the rule reports that it has no reference
    return compared_config
