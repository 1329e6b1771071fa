"""Training that waits for its data, or has more data loading processes than it can use."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import CPUS, DATA_WAIT, DATA_WORKERS, is_gpu
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import Recent, by_step, means


class DataLoaderParams(Params):
    """Parameters of `DataLoader`."""

    data_wait: float = Field(
        30.0, gt=0, le=100, description="Tolerated percent of a step that is spent waiting for data."
    )
    min_threshold: float = Field(
        70.0, ge=0, description="Number of workers, in percent of the CPUs, below which more are advised."
    )
    max_threshold: float = Field(
        200.0, gt=0, description="Tolerated number of workers, in percent of the CPUs."
    )
    gpu_threshold: float = Field(
        70.0,
        gt=0,
        le=100,
        description="Percent of a GPU's utilization at which waiting times are ignored.",
    )
    window: int = Field(30, ge=1, description="Rows in the window; one every ten seconds.")
    patience: int = Field(30, ge=1, description="Rows before the first evaluation.")


class Loading(NamedTuple):
    """The data loading of one worker.

    Attributes:
        wait: mean share of a step spent waiting, over the last rows.
        gpu: mean utilization of its GPUs.
        workers: number of its data loading processes.
        cpus: number of CPUs that it may use.
    """

    wait: Recent = Recent()
    gpu: Recent = Recent()
    workers: float = 0.0
    cpus: float = 0.0


class DataLoaderState(State):
    """State of `DataLoader`, by ``worker/mode``."""

    loading: dict[str, Loading] = Field(default_factory=dict)


class DataLoader(Rule[DataLoaderParams, DataLoaderState]):
    """Fires when a step waits long for its data, or when far more processes load data than there are CPUs.

    With means over the last rows::

        data_wait >= 30 %  of a step   and   no GPU is used at gpu_threshold or more
        processes that load data > 200 % of the CPUs that this process may use

    The wait is the time from an update to the start of the next forward pass. On a GPU ``loss.item()`` also waits for the device in this time,
    so a busy GPU rules out the data loader. The bounds of 70 and 200 percent are those of SageMaker's Dataloader. Too few processes alone are
    not a finding, because a training that does not wait has enough of them; they only affect the message about a wait.

    Off by default, because programs may do other work between an update and a forward pass (a simulation, a game).
    """

    name = "data_loader"
    summary = "steps wait for data, or far more processes load data than there are CPUs"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "watermark"
    usual_causes = (
        "data are loaded in the training process (num_workers=0), or by too few workers",
        "each example is decoded or augmented repeatedly, at high cost",
        "other work runs between two steps: logging, checkpoints, an environment",
        "more workers than CPUs compete with each other",
    )
    what_to_try = (
        "set num_workers, pin_memory and persistent_workers of the data loader",
        "prepare data beforehand, or on the GPU",
        "measure the time of next(iterator) by itself",
        "set num_workers to the number of CPUs for each rank",
    )

    def evaluate(
        self, params: DataLoaderParams, state: DataLoaderState, context: Block, block: Block, now: int
    ) -> tuple[DataLoaderState, list[Finding]]:
        """Evaluate the samples that each worker took at the same time."""
        loading, findings = dict(state.loading), []
        values = means(block)
        for rows in by_step(block):
            worker_key = f"{block.worker[rows[0]]}/{block.mode_name(rows[0])}"
            named = {
                block.info(row).name: (row, float(values[row])) for row in rows if not math.isnan(values[row])
            }
            state_of_worker = loading[worker_key] = _after(
                loading.get(worker_key, Loading()), named, params.window
            )
            for name, (row, _) in sorted(named.items()):
                finding = (
                    self._judged(params, state_of_worker, block, row)
                    if name in {DATA_WAIT, DATA_WORKERS}
                    else None
                )
                findings += [finding] if finding is not None else []
        return DataLoaderState(loading=loading), findings

    def _judged(self, params: DataLoaderParams, loading: Loading, block: Block, row: int) -> Finding | None:
        name = block.info(row).name
        if name == DATA_WORKERS:
            limit = params.max_threshold / 100 * loading.cpus
            if not loading.cpus or loading.workers <= limit:
                return None
            message = f"{name}: {loading.workers:.0f} processes load data on {loading.cpus:.3g} CPUs"
            return finding_at(self.name, block, row, value=loading.workers, threshold=limit, message=message)
        busy = bool(loading.gpu.weight) and 100 * loading.gpu.mean >= params.gpu_threshold
        value = 100 * loading.wait.mean
        if loading.wait.seen < params.patience or value < params.data_wait or busy:
            return None
        message = f"{name}: {value:.0f} % of a step passes before it begins; {_who_loads(params, loading)}"
        return finding_at(self.name, block, row, value=value, threshold=params.data_wait, message=message)


def _after(loading: Loading, named: dict[str, tuple[int, float]], window: int) -> Loading:
    """Add the samples of one time."""
    gpus = [value for name, (_, value) in sorted(named.items()) if is_gpu(name)]
    return Loading(
        loading.wait.after(named[DATA_WAIT][1], 1, window) if DATA_WAIT in named else loading.wait,
        loading.gpu.after(max(gpus), 1, window) if gpus else loading.gpu,
        named[DATA_WORKERS][1] if DATA_WORKERS in named else loading.workers,
        named[CPUS][1] if CPUS in named else loading.cpus,
    )


def _who_loads(params: DataLoaderParams, loading: Loading) -> str:
    if not loading.workers:
        return "it has no data loading process"
    few = loading.cpus and 100 * loading.workers < params.min_threshold * loading.cpus
    return f"{loading.workers:.0f} processes load data on {loading.cpus:.3g} CPUs" + (
        ", which could hold more" if few else ""
    )
