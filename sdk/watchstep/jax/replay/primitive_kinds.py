"""What JAX's primitives do with NaN and infinity that they read, by their names. See `OperationKind`.

A primitive that is in no table here is arithmetic: no infinity is a mask for it.
"""

from __future__ import annotations

from watchstep.trace.operation_kinds import OperationKind


def kind_of_primitive(name: str) -> OperationKind:
    """Return what a primitive does with the elements that it reads."""
    return _KINDS.get(name, OperationKind.ARITHMETIC)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words("""
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj convert_element_type copy cos
    cosh digamma div erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p logistic max min mul neg nextafter pow
    real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh
""")
"""Each element of the output depends on the elements in the same place of the inputs, or on a scalar. Only these run on all shards at once."""

POSITIONAL = _words("optimization_barrier device_put sort reshard mesh_cast")
"""Output i has the elements of input i."""

IDENTITIES = _words("name sharding_constraint layout_constraint pvary shard_alike pbroadcast_identity")
"""Constraints on the place of values, and names: not evaluated, the outputs are the inputs."""

RESHAPES = _words(
    "broadcast_in_dim reshape squeeze expand_dims transpose rev convert_element_type copy copy_p stop_gradient"
)
"""NaN that the program wrote as a constant passes these without being the result of an operation."""

_NAMES = {
    OperationKind.SELECTION: """
        select_n broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice dynamic_update_slice gather scatter concatenate
        stack unstack split tile pad sort top_k copy copy_p convert_element_type reduce_precision real imag conj complex stop_gradient
        optimization_barrier device_put reshard mesh_cast name get swap freeze new_ref all_gather all_gather_invariant all_to_all ppermute
        pbroadcast pvary max min clamp reduce_max reduce_min cummax cummin argmax argmin reduce_window_max reduce_window_min scatter_max
        scatter_min pmax pmin select_and_gather_add""",
    OperationKind.ADDITION: """
        add add_any sub reduce_sum cumsum cumlogsumexp reduce_window_sum scatter_add scatter-add select_and_scatter_add psum psum_invariant
        reduce_scatter addupdate""",
    OperationKind.SCALING: "mul div neg",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in _words(names)}
