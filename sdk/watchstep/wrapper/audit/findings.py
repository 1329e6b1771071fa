"""What two runs of an audited program say about its determinism: the first difference, its likely cause, and risks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from watchstep.reading.comparison.diff import RunDifference
from watchstep.trace.comparison import OperationDifference, TraceDifference
from watchstep.trace.operations import Operation, Trace
from watchstep.wrapper.audit.record import ProgramRecord

_SEED_ALL = "call watchstep.seed_all(SEED) at the start of the program; 'watchstep audit --seed 0 -- …' shows whether that is enough"

NONDETERMINISTIC_ON_CUDA = frozenset(
    """_ctc_loss_backward _embedding_bag_dense_backward _embedding_bag_backward adaptive_avg_pool3d_backward _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward avg_pool3d_backward bincount cumsum embedding_dense_backward
    fractional_max_pool2d_backward fractional_max_pool3d_backward grid_sampler_2d_backward grid_sampler_3d_backward histc index_add index_add_
    index_copy_ index_put index_put_ kthvalue max_pool3d_with_indices_backward max_unpool2d max_unpool3d median nll_loss2d_forward put_
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward scatter_add scatter_add_ scatter_reduce scatter_reduce_ upsample_bicubic2d_backward upsample_bilinear2d_backward
    upsample_linear1d_backward upsample_trilinear3d_backward""".split()  # noqa: SIM905 - one name per line would be longer than the module
)
"""Operations that may give different results on CUDA with equal inputs, by the documentation of `torch.use_deterministic_algorithms`."""

_DROPOUT = frozenset(["bernoulli", "bernoulli_", "native_dropout", "_fused_dropout"])
_MAX_SHOWN = 5


@dataclass(frozen=True)
class RankAudit:
    """The comparison of two runs of one rank.

    Attributes:
        rank: the rank.
        records: the reports of both.
        trace: of the first run; its source lines are shown.
        operations: the comparison of the operations.
    """

    rank: int
    records: tuple[ProgramRecord, ProgramRecord]
    trace: Trace
    operations: TraceDifference


@dataclass(frozen=True)
class RunEnd:
    """How one run of an audited program ended.

    Attributes:
        run: number of the run, from 0.
        code: its exit code; negative for a signal.
        steps: rank → number of finished steps. A rank that wrote no report is missing.
        is_stopped: whether the audit stopped all of these ranks, after the requested number of steps.
        tail: the last lines of its output.
    """

    run: int
    code: int
    steps: Mapping[int, int]
    is_stopped: bool
    tail: str

    def differs(self, other: RunEnd) -> bool:
        """Whether another run took other steps, or ended with another code. The codes of runs that the audit has stopped mean nothing."""
        is_own_end = self.is_stopped and other.is_stopped
        return self.steps != other.steps or not (is_own_end or self.code == other.code)


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        runs: number of runs.
        compared: number of the run, from 0, that was compared with the first one: the first one that differs, else the last one.
        ends: how the first and the compared run ended.
        ranks: by rank, those that wrote a report in both runs.
        recorded: the comparison of the recorded figures; None if nothing was recorded.
        risks: what may differ later, or elsewhere.
    """

    runs: int
    compared: int
    ends: tuple[RunEnd, RunEnd]
    ranks: tuple[RankAudit, ...]
    recorded: RunDifference | None
    risks: tuple[str, ...] = field(default=())

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        recorded = self.recorded is not None and self.recorded.step is not None
        return recorded or self.ends_differ or any(rank.operations.differs for rank in self.ranks)

    @property
    def ends_differ(self) -> bool:
        """Whether the runs took different numbers of steps, or ended differently."""
        return self.ends[0].differs(self.ends[1])

    @property
    def first(self) -> RankAudit | None:
        """The rank with the earliest difference in its operations; None if there is none.

        A step that one run did not finish has fewer operations; that is a difference of their ends.
        """
        differing = [rank for rank in self.ranks if rank.operations.differs]
        if self.ends_differ:
            differing = [rank for rank in differing if _place(rank)[0] < _common_steps(rank)]
        return min(differing, key=_place, default=None)


def _common_steps(audit: RankAudit) -> int:
    return min(record.steps for record in audit.records)


def _place(audit: RankAudit) -> tuple[int, int]:
    difference = audit.operations
    if difference.first is not None and not difference.parts_first:
        return difference.first.a.step, difference.first.a.index
    return difference.partings[0].step, 0


def cause_of(audit: RankAudit) -> tuple[str, str]:
    """Return what kind of thing differs first, in a few words, and what to do about it."""
    difference = audit.operations
    first = difference.first
    if first is None or difference.parts_first:
        return (
            "the runs execute different operations",
            "look for a decision that depends on time, on the order of a set or of files, on a hash, or on random numbers",
        )
    if first.kind == "random":
        return _random_cause(audit, first)
    if first.kind == "input":
        return _input_cause(audit, first)
    if first.kind == "number":
        return (
            "a number that Python computed",
            "it comes from random, NumPy, time or another source outside of PyTorch; " + _SEED_ALL,
        )
    return _result_cause(audit, first.a)


def _random_cause(audit: RankAudit, first: OperationDifference) -> tuple[str, str]:
    operation = first.a
    base = _base(operation)
    name = operation.outputs[first.position].name if first.position < len(operation.outputs) else ""
    if base == "randperm":
        what = "the order of the data"
    elif base in _DROPOUT:
        what = "the random numbers of dropout"
    elif name.startswith("input["):
        what = "random samples"
    elif name and operation.step == 0:
        what = f"the initial values of {name}"
    else:
        what = "random numbers"
    own = "torch" not in differing_generators(audit.records)
    if own:
        return (
            what,
            "the generator of this operation is one of its own: give it a seed, as with watchstep.data_generator(SEED)",
        )
    return what, _SEED_ALL


def _input_cause(audit: RankAudit, first: OperationDifference) -> tuple[str, str]:
    tensor = first.a.inputs[first.position]
    is_in_module = first.a.phase != "forward" or bool(first.a.module)
    if tensor.name and not tensor.name.startswith("input["):
        return f"the values of {tensor.name}", _outside_hint(
            audit,
            "something changes them outside of PyTorch's operations, such as NumPy, a file or another library",
        )
    if tensor.name or not is_in_module:
        what = "the samples: other data, or the same in another order"
    else:
        what = "values from outside of PyTorch's operations"
    differing = differing_generators(audit.records)
    workers = [loader for record in audit.records for loader in record.loaders if loader.workers]
    hint = "it comes from outside of PyTorch's operations: files, NumPy, or a data loader's worker"
    if workers and "torch" in differing:
        hint = (
            "the seeds of the data loader's workers come from PyTorch's generator, which was not seeded; "
            + _SEED_ALL
        )
        return what, hint
    return what, _outside_hint(audit, hint)


def _outside_hint(audit: RankAudit, hint: str) -> str:
    """Return a hint, or one about the generators that were not seeded if there are any."""
    differing = differing_generators(audit.records)
    return f"generators that were not seeded: {', '.join(differing)}; {_SEED_ALL}" if differing else hint


def _result_cause(audit: RankAudit, operation: Operation) -> tuple[str, str]:
    if _base(operation) in NONDETERMINISTIC_ON_CUDA and _is_on_cuda(operation):
        return (
            "an operation without a deterministic result on CUDA",
            "call watchstep.seed_all(SEED, deterministic=True), or torch.use_deterministic_algorithms(True)",
        )
    if not operation.name.startswith("aten."):
        return (
            "a custom operation",
            "it gives different results for equal inputs: look for random numbers, time or uninitialized memory in it",
        )
    differing = differing_generators(audit.records)
    suffix = f"; generators that were not seeded: {', '.join(differing)}" if differing else ""
    return (
        "an operation with equal inputs and another result",
        f"its values come from Python code, from memory that something else changes, or from a kernel that is not deterministic{suffix}",
    )


def differing_generators(records: Sequence[ProgramRecord]) -> list[str]:
    """Return generators that the program used, and whose states differ after a step."""
    a, b = (record.generators for record in records)
    names = dict.fromkeys(name for states in (*a, *b) for name in states)
    return [name for name in names if _first_difference(a, b, name) is not None]


def _first_difference(
    a: Sequence[Mapping[str, str]], b: Sequence[Mapping[str, str]], name: str
) -> int | None:
    """Return the first step after which a used generator differs; None if there is none."""
    used = any(len({states[name] for states in each if name in states}) > 1 for each in (a, b))
    if not used:
        return None
    for step, (x, y) in enumerate(zip(a[1:], b[1:], strict=False)):
        if x.get(name) != y.get(name):
            return step
    return None


def risks_of(ranks: Sequence[RankAudit], hash_seed: str) -> list[str]:
    """Return what may make runs differ that these runs did not show.

    Args:
        ranks: the comparisons.
        hash_seed: ``PYTHONHASHSEED`` of the audit's environment; empty if it was not set.
    """
    risks: dict[str, None] = {}
    for audit in ranks:
        for name in differing_generators(audit.records):
            step = _first_difference(audit.records[0].generators, audit.records[1].generators, name)
            risks[
                f"generator {name} was not seeded, or with a value that changes: it differs after step {step}"
            ] = None
        risks.update(dict.fromkeys(_operation_risks(audit)))
        flags = audit.records[0].flags
        if flags.get("cudnn.benchmark") == "True":
            risks["torch.backends.cudnn.benchmark is on: cuDNN may choose another algorithm in each run"] = (
                None
            )
        for loader in audit.records[0].loaders:
            if loader.workers and not loader.has_generator:
                risks[
                    f"a DataLoader with {loader.workers} workers ({loader.sampler}) has no generator: its order changes when the program draws "
                    "one random number more; give it generator=watchstep.data_generator(SEED)"
                ] = None
        if not audit.records[0].seeds:
            risks[
                "the program does not call watchstep.seed_all: its seeds are not recorded with its runs"
            ] = None
        risks.update(dict.fromkeys(audit.records[0].notes))
    if not hash_seed:
        risks[
            "PYTHONHASHSEED is not set: the audit set it to 0; without it the order of sets of strings differs between processes"
        ] = None
    return list(risks)


def _operation_risks(audit: RankAudit) -> Iterator[str]:
    if audit.records[0].flags.get("deterministic_algorithms") == "True":
        return
    found: dict[str, str] = {}
    for operation in audit.trace.operations:
        base = _base(operation)
        if base in NONDETERMINISTIC_ON_CUDA and base not in found and _is_on_cuda(operation):
            site = audit.trace.line_of(operation)
            found[base] = f"{operation.name} at {site}" if site is not None else operation.name
    for text in list(found.values())[:_MAX_SHOWN]:
        yield f"{text} may be non-deterministic on CUDA, and torch.use_deterministic_algorithms is off"


def _is_on_cuda(operation: Operation) -> bool:
    return any(tensor.device.startswith("cuda") for tensor in (*operation.outputs, *operation.inputs))


def _base(operation: Operation) -> str:
    return [*operation.name.split("."), ""][1]


def record_data(record: ProgramRecord) -> dict[str, Any]:
    """Return seeds, flags and loaders of a report as JSON data."""
    return {
        "steps": record.steps,
        "seeds": record.seeds,
        "flags": record.flags,
        "loaders": [
            {"workers": loader.workers, "sampler": loader.sampler, "has_generator": loader.has_generator}
            for loader in record.loaders
        ],
    }
