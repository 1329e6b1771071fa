import { expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import { sidesOf, writersOf } from "./neighbours";

const tensor = (id: number, nonfinite: boolean | null = null, name = ""): Schemas["TracedTensorOutput"] => ({
  id,
  name,
  dtype: "float32",
  shape: [2],
  device: "cpu",
  nonfinite,
  health: null,
});
const digest = (index: number, bad = false): Schemas["OperationDigest"] => ({
  index,
  step: 0,
  name: `op${index}`,
  node: "",
  phase: "forward",
  module: "m",
  bad,
  shapes: [],
});

it("has each writer, each reader and each unwritten tensor once", () => {
  const operation: Schemas["OperationOutput"] = {
    ...digest(5),
    inputs: [tensor(1), tensor(2), tensor(2), tensor(3, null, "fc.weight")],
    outputs: [tensor(4, true), tensor(9, false)],
    more_tensors: 0,
    forward: null,
    error: "",
    stack: [],
  };
  const graph: Schemas["OperationGraph"] = {
    operations: [digest(2, true), digest(3), digest(5), digest(6), digest(7)],
    edges: [
      { source: 2, target: 5, tensor: 1 },
      { source: 3, target: 5, tensor: 2 },
      { source: 2, target: 3, tensor: 1 },
      { source: 5, target: 6, tensor: 4 },
      { source: 5, target: 6, tensor: 9 },
      { source: 5, target: 7, tensor: 9 },
    ],
    truncated: false,
  };
  const { inputs, outputs } = sidesOf(operation, graph);
  expect(inputs.map(({ index, title, bad }) => [index, title, bad])).toEqual([
    [2, "op2", true],
    [3, "op3", false],
    [null, "fc.weight", false],
  ]);
  expect(outputs.map(({ index, bad }) => [index, bad])).toEqual([
    [6, true],
    [7, false],
  ]);
  expect(writersOf(5, graph)).toEqual([2, 3]);
});
