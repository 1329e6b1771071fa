"""What a rule says about one step and tensor, and where in the flow of data that lies."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator

from watchstep.block import Block
from watchstep.tensors import Mode, TensorInfo

_PHASES = {"weight": 0, "bias": 0, "input": 1, "output": 1, "loss": 2, "gradient": 3}


class Finding(BaseModel):
    """One hit of a rule.

    Attributes:
        rule: the rule's name.
        step: the step that was judged.
        mode: its mode.
        worker: the rank whose row was judged; the number of the replica where shards were merged.
        tensor: the tensor's name; empty for a finding about the run as a whole.
        module: path of the module that owns it, empty where none does.
        module_type: the module's class.
        role: what the tensor is to it: weight, gradient, output, loss, …
        value: what was seen.
        threshold: what it was held against.
        message: both in words, with the unit.
        time_ns: when the row was taken, nanoseconds since the epoch.
        cause_rank: orders the findings of one step by the way data flows: weights, forward, loss, backward.
        upstream: tensors that data came through before, and that were seen to be bad at this step, though they are no finding by
            themselves; the message tells of them.
        origin: of NaN and infinity, the output that was the first in the order of execution to hold some, as far as outputs of this
            step, mode and worker were recorded; empty where none did, or where only the input was bad.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    rule: str
    step: int
    mode: Mode
    worker: int
    tensor: str
    module: str
    module_type: str
    role: str = ""
    value: float
    threshold: float
    message: str
    time_ns: int
    cause_rank: tuple[int, int]
    upstream: tuple[str, ...] = ()
    origin: str = ""

    @field_validator("message")
    @classmethod
    def _can_be_kept(cls, value: str) -> str:
        """Databases take no NUL in a text, and a rule of a user's own may say anything."""
        return value.replace("\0", "\ufffd")


def cause_rank(info: TensorInfo) -> tuple[int, int]:
    """Where a tensor stands in one step's flow of data; what is lower can be the cause of what is higher.

    A step reads its weights, computes outputs in module order, then the loss, then gradients in reverse module order.
    """
    phase = _PHASES.get(info.role, len(_PHASES))
    return phase, -info.order if info.role == "gradient" else info.order


Likelihood = tuple[int, tuple[int, int], int]
"""Step, cause rank and worker: what is lower is the likelier cause."""


def likelihood(finding: Finding) -> Likelihood:
    """Orders findings: what comes first is the likelier cause. By step, then as data flows, then by rank."""
    return finding.step, finding.cause_rank, finding.worker


def finding_at(rule: str, block: Block, row: int, *, value: float, threshold: float, message: str) -> Finding:
    """A finding about one row of a block."""
    info = block.info(row)
    return Finding(
        rule=rule,
        step=int(block.step[row]),
        mode=block.mode_name(row),
        worker=int(block.worker[row]),
        tensor=info.name,
        module=info.module,
        module_type=info.module_type,
        role=info.role,
        value=value,
        threshold=threshold,
        message=message,
        time_ns=int(block.time_ns[row]),
        cause_rank=cause_rank(info),
    )


def finding_of_run(
    rule: str, step: int, now: int, *, value: float, threshold: float, message: str
) -> Finding:
    """A finding about the run as a whole, which no row shows.

    Args:
        rule: the rule's name.
        step: the last step that was seen.
        now: the tick of the evaluation, nanoseconds since the epoch.
        value: what was seen.
        threshold: what it was held against.
        message: both in words.
    """
    return Finding(
        rule=rule,
        step=step,
        mode="global",
        worker=0,
        tensor="",
        module="",
        module_type="",
        value=value,
        threshold=threshold,
        message=message,
        time_ns=now,
        cause_rank=(len(_PHASES), 0),
    )
