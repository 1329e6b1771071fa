"""What operations do with infinity that they read, by their names: whether they pass it on as it is, and whether it may be a mask for them."""

from __future__ import annotations

from enum import Enum

from watchstep.trace.operations import Operation, TracedTensor


class OperationKind(Enum):
    """What an operation does with the elements that it reads.

    Attributes:
        FILL: writes a number of its own that is infinite or NaN, and passes the other elements on.
        SELECTION: passes elements on as they are.
        ADDITION: adds elements, or takes their extremes, so that -inf is a mask for it.
        SCALING: multiplies or divides elements.
        SOFTMAX: ignores elements that are -inf.
        ARITHMETIC: anything else. No infinity is a mask for it.
    """

    FILL = "fill"
    SELECTION = "selection"
    ADDITION = "addition"
    SCALING = "scaling"
    SOFTMAX = "softmax"
    ARITHMETIC = "arithmetic"


def kind_of(operation: Operation) -> OperationKind:
    """Return what an operation does with the elements that it reads. Operations that are not in a table here are arithmetic."""
    base = _base_of(operation)
    if operation.infinite_argument and base in _FILLS:
        return OperationKind.FILL
    if operation.is_view:
        return OperationKind.SELECTION
    return OperationKind.SOFTMAX if _is_attention(base) else _KINDS.get(base, OperationKind.ARITHMETIC)


def is_elementwise(operation: Operation) -> bool:
    """Return whether each element of the output is a sum, difference, product or quotient of one element of each input."""
    return _base_of(operation) in _ELEMENTWISE


def may_mask(operation: Operation, tensor: TracedTensor) -> bool:
    """Return whether -inf in an input of an operation of the kind SOFTMAX may be a mask. Queries, keys and values of attention are none."""
    base = _base_of(operation)
    if not _is_attention(base):
        return True
    computed = 4 if base.endswith("backward") else 3  # a backward pass reads the gradient before them
    return not any(tensor is each for each in operation.inputs[:computed])


def _base_of(operation: Operation) -> str:
    """The name without namespace, overload and the mark of operations in place, as ``masked_fill``; that of TensorFlow as it is."""
    words = operation.name.split(".")
    return words[1].rstrip("_") if len(words) > 1 else operation.name


def _is_attention(base: str) -> bool:
    return base.startswith(("_scaled_dot_product_", "_efficient_attention_", "_flash_attention_"))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILLS = _words("""
    masked_fill full full_like new_full fill where scalar_tensor clamp clamp_min clamp_max constant_pad_nd index_fill scatter
""")
"""Operations that write a number among their arguments as it is, without arithmetic."""
_ELEMENTWISE = _words("add sub rsub mul div Add AddV2 Sub BiasAdd Mul RealDiv")
_NAMES = {
    # TensorFlow's names begin with a capital letter.
    OperationKind.SELECTION: """
        where masked_fill masked_scatter masked_select fill full_like index index_select index_copy index_fill index_put _index_put_impl
        _unsafe_index _unsafe_index_put gather take scatter select_scatter slice_scatter diagonal_scatter as_strided_scatter embedding
        cat stack clone copy _to_copy lift_fresh lift repeat repeat_interleave expand_copy roll flip rot90 tril triu diag_embed
        constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d _reshape_copy view_copy permute_copy
        sort topk kthvalue slice_backward select_backward diagonal_backward unfold_backward nan_to_num set resize
        Select SelectV2 Identity IdentityN Snapshot StopGradient Reshape ConcatV2 GatherV2 GatherNd ResourceGather Cast Pack Unpack
        Transpose BroadcastTo Tile StridedSlice Slice Split SplitV ExpandDims Squeeze Fill Pad PadV2 MatrixBandPart ReadVariableOp""",
    OperationKind.ADDITION: """
        add sub rsub sum cumsum index_add scatter_add max min amax amin aminmax maximum minimum fmax fmin clamp clamp_min clamp_max
        cummax cummin _cummax_helper _cummin_helper scatter_reduce max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
        Add AddV2 AddN Sub BiasAdd Sum Cumsum Maximum Minimum Max Min ClipByValue MaxPool""",
    OperationKind.SCALING: "mul div Mul RealDiv",
    OperationKind.SOFTMAX: """
        softmax log_softmax _softmax _log_softmax _safe_softmax _masked_softmax logsumexp logaddexp logaddexp2 logcumsumexp
        _logcumsumexp _softmax_backward_data _log_softmax_backward_data Softmax LogSoftmax""",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in _words(names)}
