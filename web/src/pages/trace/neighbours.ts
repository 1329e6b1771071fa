import type { Schemas } from "../../api/client";
import { shapeText } from "./sentences";

// The neighbourhood of an operation: what it read with the operations that wrote it, and what reads its outputs.

/** A box beside the selected operation. */
export interface GraphNode {
  /** Index of the operation; null for a tensor that no operation of the step wrote. */
  index: number | null;
  title: string;
  /** Second line: the module, or where the tensor is from. */
  detail: string;
  /** What flows between it and the selected operation. */
  tensor: string;
  /** Whether that is not finite. */
  bad: boolean;
}

export interface GraphSides {
  inputs: readonly GraphNode[];
  outputs: readonly GraphNode[];
}

/** Return the boxes left and right of an operation, each operation and each tensor once. */
export function sidesOf(operation: Schemas["OperationOutput"], graph: Schemas["OperationGraph"]): GraphSides {
  const digests = new Map(graph.operations.map((each) => [each.index, each]));
  const writers = new Map<number, number>();
  const readers = new Map<number, number[]>();
  for (const edge of graph.edges) {
    if (edge.target === operation.index) writers.set(edge.tensor, edge.source);
    if (edge.source === operation.index)
      readers.set(edge.target, [...(readers.get(edge.target) ?? []), edge.tensor]);
  }
  const inputs = new Map<string, GraphNode>();
  for (const tensor of operation.inputs) {
    const writer = digests.get(writers.get(tensor.id) ?? -1);
    const key = writer === undefined ? `tensor ${tensor.id}` : `operation ${writer.index}`;
    const earlier = inputs.get(key);
    // Whether an input was finite is counted only beside a bad output; the operation that wrote it knows.
    const bad = isBad(tensor) ?? writer?.bad ?? false;
    const text = `${tensor.dtype} ${shapeText(tensor.shape)}`.trim();
    inputs.set(key, {
      index: writer?.index ?? null,
      title: writer?.name ?? (tensor.name || "a tensor"),
      detail: writer === undefined ? "not written in this step" : writer.module,
      tensor: earlier === undefined || earlier.tensor === text ? text : `${earlier.tensor}, ${text}`,
      bad: bad || (earlier?.bad ?? false),
    });
  }
  const outputs: GraphNode[] = [];
  for (const [index, tensors] of readers) {
    const reader = digests.get(index);
    if (reader === undefined) continue;
    const read = operation.outputs.filter(({ id }) => tensors.includes(id));
    outputs.push({
      index,
      title: reader.name,
      detail: reader.module,
      tensor: read.map((tensor) => `${tensor.dtype} ${shapeText(tensor.shape)}`.trim()).join(", "),
      bad: read.some((tensor) => tensor.nonfinite === true),
    });
  }
  return { inputs: [...inputs.values()], outputs };
}

function isBad({ health, nonfinite }: Schemas["TracedTensorOutput"]): boolean | null {
  if (health !== null) return health.nan + health.pos_inf + health.neg_inf > 0;
  return nonfinite;
}

/** Return the indexes of the operations that wrote what an operation read. */
export function writersOf(index: number, graph: Schemas["OperationGraph"]): number[] {
  return [...new Set(graph.edges.filter(({ target }) => target === index).map(({ source }) => source))];
}
