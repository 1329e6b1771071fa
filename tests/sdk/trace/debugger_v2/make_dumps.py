"""Makes the dumps in ``dumps.tar.xz``, and what TensorFlow's own reader reads of them. Needs TensorFlow, which no test does.

``python -m venv /tmp/tfenv && /tmp/tfenv/bin/pip install tensorflow-cpu && /tmp/tfenv/bin/python make_dumps.py``

A dump contains the text of each source file on a stack, some megabytes of TensorFlow's own. The lines of installed packages and of Python's
library are removed from the ``.source_files``, where the events of these files remain. All other files are byte for byte as TensorFlow wrote
them. In ``hosts``, the second set of files is a copy of the first one's graph executions with a head of its own, as of a second host.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

HERE = Path(__file__).parent
WORK = Path("/tmp/watchstep-dumps")  # a path without names of users, since dumps contain it
MODES = ("NO_TENSOR", "CURT_HEALTH", "CONCISE_HEALTH", "FULL_HEALTH", "SHAPE", "FULL_TENSOR")


def main() -> None:
    """Make all dumps."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    shutil.copy(HERE / "dumped_program.py", WORK)
    for mode in MODES:
        for program in ("graph", "eager"):
            make(f"{program}-{mode.lower()}", [mode, program])
    for mode in ("CURT_HEALTH", "FULL_HEALTH", "FULL_TENSOR"):
        make(f"nested-{mode.lower()}", [mode, "nested"])
    make("ring", ["CONCISE_HEALTH", "graph", "30"])
    make("filtered", ["SHAPE", "eager", "-1", "float32"])
    root = dumped("hosts", ["FULL_HEALTH", "graph"])
    add_host(root)
    write_expected(root)
    with tarfile.open(HERE / "dumps.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(WORK.glob("*/*"), key=lambda path: (path.suffix, path)):
            entry = archive.gettarinfo(path, str(path.relative_to(WORK)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with path.open("rb") as file:
                archive.addfile(entry, file)


def make(name: str, arguments: list[str]) -> None:
    """Make one dump."""
    write_expected(dumped(name, arguments))


def dumped(name: str, arguments: list[str]) -> Path:
    """Run the program, and return the folder of its dump."""
    root = WORK / name
    command = [sys.executable, str(WORK / "dumped_program.py"), str(root), *arguments]
    subprocess.run(command, check=True, capture_output=True)
    for path in root.iterdir():  # named after this machine
        path.rename(root / f"tfdbg_events.1700000000.host-0{path.suffix}")
    drop_library_texts(next(root.glob("*.source_files")))
    return root


def drop_library_texts(path: Path) -> None:
    """Remove the lines of files that do not belong to the program."""
    import tensorflow as tf
    from tensorflow.core.protobuf import debug_event_pb2

    events = [
        debug_event_pb2.DebugEvent.FromString(data.numpy()) for data in tf.data.TFRecordDataset(str(path))
    ]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for event in events:
            if not event.source_file.file_path.startswith(str(WORK)):
                del event.source_file.lines[:]
            writer.write(event.SerializeToString())


def add_host(root: Path) -> None:
    """Add the files of a second host."""
    import tensorflow as tf
    from tensorflow.core.protobuf import debug_event_pb2

    first = next(root.glob("*.metadata"))
    for path in list(root.iterdir()):
        copy = root / path.name.replace("host-0", "host-1")
        if path.suffix == ".graph_execution_traces":
            shutil.copy(path, copy)
        else:
            copy.touch()
    (data,) = tf.data.TFRecordDataset(str(first))
    event = debug_event_pb2.DebugEvent.FromString(data.numpy())
    event.wall_time += 1e-3
    with tf.io.TFRecordWriter(str(first).replace("host-0", "host-1")) as writer:
        writer.write(event.SerializeToString())


def write_expected(root: Path) -> None:
    """Write what TensorFlow reads of a dump into its folder."""
    (root / "expected.json").write_text(json.dumps(expected(root), default=int))


def expected(root: Path) -> dict[str, Any]:
    """What TensorFlow's reader says."""
    from tensorflow.python.debug.lib.debug_events_monitors import InfNanMonitor
    from tensorflow.python.debug.lib.debug_events_reader import DebugDataReader

    stacks: list[Any] = []

    def stack(frames: list[Any]) -> int:
        frames = [list(frame) for frame in frames]
        if frames not in stacks:
            stacks.append(frames)
        return stacks.index(frames)

    with DebugDataReader(str(root)) as reader:
        reader.update()
        # A monitor that watches an update waits for a lock of its own thread in mode FULL_TENSOR.
        monitor = InfNanMonitor(reader)
        for number, each in enumerate(reader.graph_execution_traces()):
            monitor.on_graph_execution_trace(number, each)
        for number, each in enumerate(reader.executions()):
            monitor.on_execution(number, each)
        executions = [
            {
                "type": each.op_type,
                "function": bool(each.graph_id),
                "inputs": len(each.input_tensor_ids or ()),
                "outputs": len(each.output_tensor_ids or ()),
                "mode": each.tensor_debug_mode,
                "values": values(reader, each),
                "stack": stack(reader.read_execution_stack_trace(each)[1]),
            }
            for each in reader.executions()
        ]
        traces = []
        for each in reader.graph_execution_traces():
            digest = reader.graph_by_id(each.graph_id).get_op_creation_digest(each.op_name)
            full = each.tensor_debug_mode == 7
            traces.append(
                {
                    "type": each.op_type,
                    "name": each.op_name,
                    "output": each.output_slot,
                    "graphs": [reader.graph_by_id(graph).name for graph in each.graph_ids],
                    "inputs": len(digest.input_names or ()),
                    "values": array(reader.graph_execution_trace_to_tensor_value(each))
                    if full
                    else each.debug_tensor_value,
                    "stack": stack(reader.read_graph_op_creation_stack_trace(digest)[1]),
                }
            )
        alerts = [
            {
                "type": alert.op_type,
                "output": alert.output_slot,
                "size": alert.size,
                "neg_inf": alert.num_neg_inf,
                "pos_inf": alert.num_pos_inf,
                "nan": alert.num_nan,
                "execution": alert.execution_index,
                "trace": alert.graph_execution_trace_index,
            }
            for alert in monitor.alerts()
        ]
        program = str(WORK / "dumped_program.py")
        source = "\n".join(reader.source_lines("host-0", program))
        return {
            "version": reader.tensorflow_version(),
            "executions": executions,
            "traces": traces,
            "alerts": alerts,
            "stacks": stacks,
            "program": program,
            "source": hashlib.sha256(source.encode()).hexdigest(),
        }


def values(reader: Any, execution: Any) -> Any:
    """The recorded numbers of each output of an execution; None for one that was not examined."""
    if execution.tensor_debug_mode == 7:
        return [array(value) for value in reader.execution_to_tensor_values(execution)]
    return execution.debug_tensor_values and [
        None if each is None else list(each) for each in execution.debug_tensor_values
    ]


def array(value: Any) -> Any:
    """A full tensor as data."""
    import numpy as np

    value = np.asarray(value)
    return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.ravel().tolist()}


if __name__ == "__main__":
    main()
