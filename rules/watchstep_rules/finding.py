"""What a rule says about one step and tensor, and where in the flow of data that lies."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from watchstep.block import Block
from watchstep.tensors import Mode, TensorInfo

_PHASES = {"weight": 0, "bias": 0, "input": 1, "output": 1, "loss": 2, "gradient": 3}


class Finding(BaseModel):
    """One hit of a rule.

    Attributes:
        rule: the rule's name.
        step: the step that was judged.
        mode: its mode.
        worker: the rank whose row was judged; the lowest one where shards were merged.
        tensor: the tensor's name.
        module: path of the module that owns it, empty where none does.
        module_type: the module's class.
        value: what was seen.
        threshold: what it was held against.
        message: both in words, with the unit.
        time_ns: when the row was taken, nanoseconds since the epoch.
        cause_rank: orders the findings of one step by the way data flows: weights, forward, loss, backward.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    rule: str
    step: int
    mode: Mode
    worker: int
    tensor: str
    module: str
    module_type: str
    value: float
    threshold: float
    message: str
    time_ns: int
    cause_rank: tuple[int, int]


def cause_rank(info: TensorInfo) -> tuple[int, int]:
    """Where a tensor stands in one step's flow of data; what is lower can be the cause of what is higher.

    A step reads its weights, computes outputs in module order, then the loss, then gradients in reverse module order.
    """
    phase = _PHASES.get(info.role, len(_PHASES))
    return phase, -info.order if info.role == "gradient" else info.order


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
        value=value,
        threshold=threshold,
        message=message,
        time_ns=int(block.time_ns[row]),
        cause_rank=cause_rank(info),
    )
