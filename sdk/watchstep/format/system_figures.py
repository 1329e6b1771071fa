"""Figures of the process and its machine, recorded in addition to those of the training: names, units and meaning.

A row summarizes the samples since the previous row: its count is the number of samples; its minimum, maximum, mean and histogram
describe their values. Shares are 0 … 1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

CPU = "system/cpu"
CPUS = "system/cpus"
MEMORY = "system/memory"
MEMORY_PRIVATE = "system/memory_private"
DATA_WORKERS = "system/data_workers"
STEP_SECONDS = "system/step_seconds"
DATA_WAIT = "system/data_wait"
INITIALIZATION_SECONDS = "system/initialization_seconds"
NODE_CPU = "system/node_cpu"
NODE_MEMORY = "system/node_memory"
NODE_IOWAIT = "system/node_iowait"
NODE_IO_STALL = "system/node_io_stall"
NODE_DISK_READ = "system/node_disk_read"
NODE_DISK_WRITTEN = "system/node_disk_written"
NODE_NETWORK_RECEIVED = "system/node_network_received"
NODE_NETWORK_SENT = "system/node_network_sent"
GPU = "system/gpu_"
GPU_MEMORY = "_memory"

_GPU_NAME = re.compile(r"system/gpu_\d+$")
_GPU_MEMORY_NAME = re.compile(r"system/gpu_\d+_memory$")


class Figure(NamedTuple):
    """One figure.

    Attributes:
        name: Name of the tensor; ``N`` represents a number.
        of: What it measures: the process of each rank, or its machine.
        unit: Unit of a sample.
        meaning: Description.
    """

    name: str
    of: str
    unit: str
    meaning: str


FIGURES = (
    Figure(CPU, "process", "share", "processor time, of the CPUs that the process may use"),
    Figure(CPUS, "process", "CPUs", "that the process may use, by its affinity and its container's quota"),
    Figure(MEMORY, "process", "bytes", "memory that is resident"),
    Figure(MEMORY_PRIVATE, "process", "bytes", "the same without pages of files and shared memory"),
    Figure(
        DATA_WORKERS,
        "process",
        "processes",
        "that load data for it, by PyTorch 2.6 and later; where there are any",
    ),
    Figure(
        STEP_SECONDS, "process", "seconds", "from update to update; steps with an evaluation in them left out"
    ),
    Figure(
        DATA_WAIT, "process", "share", "of a step: from the update before it to the start of its forward pass"
    ),
    Figure(
        INITIALIZATION_SECONDS,
        "process",
        "seconds",
        "from the start of the process to its first update; once",
    ),
    Figure(
        NODE_CPU, "machine", "share", "of its CPUs that is busy; of the container's quota, where it has one"
    ),
    Figure(
        NODE_MEMORY,
        "machine",
        "share",
        "of its memory that is used; of the container's limit, where it has one",
    ),
    Figure(NODE_IOWAIT, "machine", "share", "of its CPUs that is idle and waits for disks"),
    Figure(
        NODE_IO_STALL,
        "machine",
        "share",
        "of time in which some task waits for disks, where the kernel tells",
    ),
    Figure(NODE_DISK_READ, "machine", "bytes a second", "read from its disks"),
    Figure(NODE_DISK_WRITTEN, "machine", "bytes a second", "written to its disks"),
    Figure(NODE_NETWORK_RECEIVED, "machine", "bytes a second", "received, but by way of its loopback"),
    Figure(NODE_NETWORK_SENT, "machine", "bytes a second", "sent, but by way of its loopback"),
    Figure(GPU + "N", "GPU", "share", "of time in which it computes"),
    Figure(GPU + "N" + GPU_MEMORY, "GPU", "share", "of its memory that is taken, by whomever"),
)


def is_gpu(name: str) -> bool:
    """Return whether it is the utilization of a GPU."""
    return _GPU_NAME.match(name) is not None


def is_gpu_memory(name: str) -> bool:
    """Return whether it is the memory of a GPU."""
    return _GPU_MEMORY_NAME.match(name) is not None
