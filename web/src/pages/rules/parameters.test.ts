import { expect, it } from "vitest";
import { boundsText, fieldsOf, numberOf, shownValue, unitOf } from "./parameters";

const fields = fieldsOf({
  properties: {
    threshold: { type: "number", exclusiveMinimum: 0, default: 1e-7, description: "Mean magnitude." },
    share: { anyOf: [{ type: "number", minimum: 0, maximum: 1 }, { type: "null" }], default: null },
    patience: { type: "integer", minimum: 1, default: 20, description: "Number of steps without progress." },
    format: { enum: ["fp16", "bf16"], type: "string", default: "fp16" },
    strict: { type: "boolean", default: false },
    names: {
      anyOf: [
        { anyOf: [{ type: "string" }, { type: "array", items: { type: "string" } }] },
        { type: "null" },
      ],
    },
    baseline: { $ref: "#/$defs/Baseline" },
    query: { type: "string", maxLength: 10000 },
  },
  required: ["query"],
});

it("makes a field for each parameter of a schema", () => {
  expect(fields.map(({ name, kind }) => [name, kind])).toEqual([
    ["threshold", "number"],
    ["share", "number"],
    ["patience", "integer"],
    ["format", "choice"],
    ["strict", "switch"],
    ["names", "lines"],
    ["baseline", "other"],
    ["query", "text"],
  ]);
  expect(fields.map(boundsText).slice(0, 3)).toEqual(["more than 0", "0 to 1", "at least 1"]);
  expect(fields.map(({ unit }) => unit).slice(0, 3)).toEqual(["", "share", "steps"]);
  expect(fields.at(-1)?.required).toBe(true);
  expect(fieldsOf({})).toEqual([]);
});

it("recognizes units", () => {
  expect(unitOf("memory_mb", "Limit of memory for one step, in MiB.")).toBe("MiB");
  expect(unitOf("seconds", "Limit.")).toBe("s");
  expect(unitOf("growth", "Tolerated ratio of a gradient's norm to the reference.")).toBe("×");
  expect(unitOf("x", "A value.")).toBe("");
});

it("reads numbers as they are typed, and keeps what is none", () => {
  expect(["", " 1e-7 ", "0.5", "1e-", "abc"].map(numberOf)).toEqual([undefined, 1e-7, 0.5, "1e-", "abc"]);
  expect([null, 0.5, ["a", "b"], { a: 1 }, false].map(shownValue)).toEqual([
    "",
    "0.5",
    "a\nb",
    '{"a":1}',
    "false",
  ]);
});
