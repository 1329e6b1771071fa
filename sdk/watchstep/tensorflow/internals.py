"""Names of TensorFlow that are private, or that another version may lack: the one place where they are looked up."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from watchstep.capture.framework_names import FrameworkName, FrameworkNames

_GRAPHS = "updates in functions of tf.function"
_TAPES = "gradients of tapes"

at = FrameworkName.at
tensorflow_names = FrameworkNames(
    "TensorFlow",
    {
        "enter": at(_TAPES, "tensorflow:GradientTape.__enter__"),
        "exit": at(_TAPES, "tensorflow:GradientTape.__exit__"),
        "gradient": at(_TAPES, "tensorflow:GradientTape.gradient"),
        "jacobian": at(_TAPES, "tensorflow:GradientTape.jacobian"),
        "batch_jacobian": at(_TAPES, "tensorflow:GradientTape.batch_jacobian"),
        "vectorized_map": at(_TAPES, "tensorflow:vectorized_map"),
        "nest": at(_TAPES, "tensorflow:nest.flatten"),
        "default_graph": at(_GRAPHS, "tensorflow:compat.v1.get_default_graph"),
        # Without these two, a program could not save a function that contains the recorder's operations.
        "trace": at(_GRAPHS, "tensorflow:*._get_concrete_function_garbage_collected"),
        "clone": at(_GRAPHS, "tensorflow:*._clone"),
        # Without it, each function that is traced without a call is traced twice.
        "captured": at("functions that need no second trace", "tensorflow:*.captured_inputs"),
        "outer_graph": at(_GRAPHS, "tensorflow.python.framework.func_graph:FuncGraph.outer_graph"),
        "is_compiled": at(
            "gradients of embeddings without a copy of the whole table",
            "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
        ),
    },
)


def has_tapes() -> bool:
    """Return whether this TensorFlow has all that recording gradients of tapes needs."""
    return tensorflow_names.has(
        "enter", "exit", "gradient", "jacobian", "batch_jacobian", "vectorized_map", "nest"
    )


def has_graphs(function: Any) -> bool:
    """Return whether this TensorFlow has all that recording in graphs needs.

    Args:
        function: a function of `tf.function`.
    """
    methods = [tensorflow_names.of(function, key) for key in ("trace", "clone")]
    return None not in methods and tensorflow_names.has("default_graph", "outer_graph")


def graphs_of_trace() -> list[Any]:
    """Return the graph that is being built and those that enclose it, innermost first; none if they are unknown."""
    if not tensorflow_names.has("default_graph", "outer_graph"):
        return []
    graphs = [tensorflow_names.find("default_graph")()]
    while (outer := getattr(graphs[-1], tensorflow_names.attribute("outer_graph"), None)) is not None:
        graphs.append(outer)
    return graphs


def is_compiled() -> bool:
    """Return whether the graph that is being traced is compiled by XLA; True if that is unknown."""
    ask = tensorflow_names.find("is_compiled")
    if ask is None:
        return True
    try:
        return bool(ask(tf.compat.v1.get_default_graph()))
    except Exception:  # noqa: BLE001 - it is not a public function
        tensorflow_names.lacks("is_compiled")
        return True
