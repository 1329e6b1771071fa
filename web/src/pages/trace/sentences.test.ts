import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import {
  badText,
  causeText,
  clipped,
  inputsText,
  nothingText,
  shapeText,
  stateOf,
  stepsText,
  whereText,
} from "./sentences";
import { linesAround } from "./source-lines";

const health = (more: Partial<Schemas["HealthOutput"]> = {}): Schemas["HealthOutput"] => ({
  elements: 48,
  nan: 0,
  pos_inf: 0,
  neg_inf: 0,
  negative: null,
  zero: null,
  positive: null,
  figures: [null, null, null, null, null],
  first_bad: [],
  exact: true,
  ...more,
});
const tensor = (more: Partial<Schemas["TracedTensorOutput"]> = {}): Schemas["TracedTensorOutput"] => ({
  id: 1,
  name: "",
  dtype: "float32",
  shape: [16, 3],
  device: "cpu",
  nonfinite: null,
  health: null,
  ...more,
});
const operation = {
  index: 4,
  step: 5,
  name: "aten.log",
  node: "",
  phase: "forward",
  module: "head",
  bad: true,
  shapes: [],
};
const origin = (more: Partial<Schemas["OriginOutput"]> = {}): Schemas["OriginOutput"] => ({
  cause: "operation",
  operation,
  tensor: tensor({ nonfinite: true, health: health({ neg_inf: 31 }) }),
  inputs: [],
  reaches: "loss",
  error: "",
  line: null,
  ...more,
});

describe("sentences", () => {
  it("have names that neither fill them nor turn them", () => {
    expect(clipped(`a\u202eb${"w".repeat(500)}`)).toBe(`ab${"w".repeat(118)}…`);
    expect(clipped("fc.weight")).toBe("fc.weight");
  });

  it("describe tensors", () => {
    expect(shapeText([16, -1, 3])).toBe("16 × ? × 3");
    expect(shapeText([])).toBe("scalar");
    expect(badText(tensor({ health: health({ nan: 2, neg_inf: 31 }) }))).toBe("2 NaN, 31 −inf of 48");
    expect(badText(tensor({ health: health({ nan: 1, exact: false }) }))).toBe("NaN of 48");
    expect(stateOf(tensor())).toEqual({ text: "not checked", tone: "quiet" });
    expect(stateOf(tensor({ nonfinite: false })).text).toBe("finite");
    expect(stateOf(tensor({ nonfinite: true }))).toEqual({ text: "not finite", tone: "fault" });
  });

  it("describe the first bad operation", () => {
    expect(whereText(operation)).toBe("step 5, forward pass of head");
    expect(whereText({ step: -1, phase: "graph", module: "" })).toBe("graph");
    expect(causeText(origin())).toBe("made 31 −inf of 48 from finite inputs");
    expect(causeText(origin({ tensor: tensor({ nonfinite: true }) }))).toBe(
      "made values that are not finite from finite inputs",
    );
    expect(
      causeText(
        origin({ cause: "tensor", tensor: tensor({ name: "input[0]", health: health({ nan: 1 }) }) }),
      ),
    ).toBe("read input[0], which was not finite when the step began (1 NaN of 48)");
    expect(causeText(origin({ cause: "error", tensor: null }))).toBe("raised an exception");
    expect(inputsText(origin({ inputs: [tensor({ health: health({ zero: 31 }) }), tensor()] }))).toBe(
      "input 0 has 31 zeros of 48",
    );
    expect(stepsText(4, 5) + stepsText("7", "7")).toBe("steps 4–5step 7");
  });

  it("describe traces without damage", () => {
    const trace = { mode: "curt_health", alerts: 0, operations: 7 } as Schemas["TraceOutput"];
    expect(nothingText(trace, 0).title).toBe("All values were finite.");
    expect(nothingText({ ...trace, alerts: 2 }, 1).text).toContain("1 operation made NaN");
    expect(nothingText({ ...trace, alerts: 2 }, 0).text).toContain("mask");
    expect(nothingText({ ...trace, mode: "shape" }, 0).title).toContain("does not say");
  });
});

it("shows the lines around a line of any text", () => {
  const text = Array.from({ length: 2000 }, (_, number) => `line ${number + 1}`).join("\n");
  const part = linesAround(text, 1000);
  expect([part.first, part.lines[0], part.lines[400], part.lines.length]).toEqual([
    600,
    "line 600",
    "line 1000",
    801,
  ]);
  expect(linesAround("a\r\nb\n", 2)).toEqual({ first: 1, lines: ["a", "b"] });
  expect(linesAround("", 5)).toEqual({ first: 1, lines: [] });
  expect(linesAround("a\nb", 99).lines).toEqual(["a", "b"]);
  expect(linesAround("x".repeat(5000), 1).lines[0]).toHaveLength(401);
});
