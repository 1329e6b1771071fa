import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import { countStates, rowsOf, usualFormat } from "./headroom";
import { defaultCollection, pathOfHeatmap, togglesOf, withToggle } from "./layer-choice";
import {
  groupScalars,
  isLogarithmic,
  linesAsColumns,
  nameOfLine,
  newestValue,
  nonfiniteRanges,
  seriesOf,
  withoutCopies,
} from "./loss-lines";
import { flatten, jobStateText } from "./settings";

const line = (
  tensor: string,
  mean: (number | null)[],
  changes: Partial<Schemas["BinnedLine"]> = {},
): Schemas["BinnedLine"] => ({
  tensor,
  figure: "mean",
  mode: "train",
  workers: 1,
  worker: null,
  derived: false,
  count: mean.map((value) => (value === null ? 0 : 1)),
  mean,
  min: mean,
  max: mean,
  nonfinite: mean.map(() => 0),
  newest: null,
  ...changes,
});

describe("scalars", () => {
  it("names lines by mode only where it tells them apart, and leaves gaps", () => {
    const lines = [line("loss", [1, 2]), line("loss", [3, null, 1], { mode: "eval" }), line("other", [1])];
    expect(seriesOf(lines, 0).map((entry) => [entry.label, entry.dashed, entry.values])).toEqual([
      ["loss (train)", false, [1, 2]],
      ["loss (eval)", true, [3, null, 1]],
      ["other", false, [1]],
    ]);
    expect(Object.keys(linesAsColumns(lines.slice(2), [0, 5]))).toEqual([
      "first_step",
      "last_step",
      "other",
      "other min",
      "other max",
    ]);
  });

  it("leaves out a loss that the program logs under another name", () => {
    const read = line("loss", [1, 2], { derived: true });
    const lines = [read, line("loss_2", [3, 4], { derived: true }), line("generator_loss", [1, 2])];
    expect(withoutCopies(lines).map(({ tensor }) => tensor)).toEqual(["loss_2", "generator_loss"]);
    expect(withoutCopies([read])).toEqual([read]);
  });

  it("names the rank of a line of one worker", () => {
    const lines = [0, 1].map((worker) => line("system/cpu", [0.5], { worker, mode: "global" }));
    expect(lines.map((each) => nameOfLine(each, lines))).toEqual([
      "system/cpu (rank 0)",
      "system/cpu (rank 1)",
    ]);
  });

  it("chooses a logarithmic axis for a wide range of positive values", () => {
    expect(isLogarithmic([line("a", [1, 1, 1, 1000])])).toBe(true);
    expect(isLogarithmic([line("a", [0, 1, 1, 1000])])).toBe(false);
    expect(isLogarithmic([line("a", [1, 2, 3])])).toBe(false);
    expect(isLogarithmic([])).toBe(false);
  });

  it("joins neighbouring columns that are not finite", () => {
    const bad = line("a", [1, null, null, 2, null], { nonfinite: [0, 1, 2, 0, 1] });
    expect(nonfiniteRanges(bad, [0, 2, 4, 6, 8, 10])).toEqual([
      { first: 2, last: 5, count: 3 },
      { first: 8, last: 9, count: 1 },
    ]);
  });

  it("groups hyperparameters by kind, and tells those that never change", () => {
    const groups = groupScalars([
      line("optimizer:learning_rate/0", [1, 2]),
      line("generator.optimizer_1:learning_rate/1", [3, 3]),
      line("optimizer:beta1/0", [0.9, null, 0.9]),
      line("accuracy", [null]),
      line("scale", [1, null, 1], { count: [5, 0, 3] }),
      line("bad", [1, null], { nonfinite: [0, 2] }),
    ]);
    expect(groups.map((group) => [group.name, group.lines.length, group.constant, group.records])).toEqual([
      ["learning rate", 2, null, null],
      ["beta1", 1, 0.9, null],
      ["accuracy", 1, null, 0],
      ["scale", 1, 1, 8],
      ["bad", 1, null, 1],
    ]);
  });

  it("states the newest value, also if it is not finite", () => {
    const newest = (value: number | null, text: string) =>
      newestValue(line("loss", [1], { newest: { step: 9, value, text } }));
    expect([newest(49152, "49152"), newest(null, "nan"), newest(null, "-inf")]).toEqual([
      "49,152",
      "NaN",
      "−∞",
    ]);
    expect(newestValue(line("loss", []))).toBe("–");
  });
});

describe("what the pictures show", () => {
  it("begins with the collection of the main alert", () => {
    const collections = { losses: 1, activations: 2, gradients: 3 };
    expect(defaultCollection(collections, [])).toBe("gradients");
    expect(defaultCollection(collections, [{ tensor: "a:output" }])).toBe("activations");
    expect(defaultCollection({ losses: 1, custom: 1 }, [])).toBe("custom");
    expect(defaultCollection({}, [])).toBe("");
  });

  it("keeps opened modules in the address, whatever their names", () => {
    let text = "";
    for (const path of ["a.b", "x,y", "100%", "ä"]) text = withToggle(togglesOf(text), path);
    expect(togglesOf(text)).toEqual(new Set(["a.b", "x,y", "100%", "ä"]));
    expect(togglesOf(withToggle(togglesOf(text), "x,y")).has("x,y")).toBe(false);
    expect(togglesOf("%zz,")).toEqual(new Set(["%zz"]));
  });

  it("requests the shown steps only", () => {
    const choice = {
      collection: "a b",
      figure: "l2",
      mode: "train",
      reduction: "max",
      from: 5,
      to: null,
      points: 300,
      worker: null,
    };
    const path =
      "/v1/projects/p%2Fq/runs/r/heatmap?collection=a+b&figure=l2&mode=train&reduce=max&points=300&rows=1000&first=5";
    expect(pathOfHeatmap("p/q", "r", choice)).toBe(path);
    expect(pathOfHeatmap("p/q", "r", { ...choice, worker: 0 })).toBe(`${path}&worker=0`);
  });

  it("says of a job that its backend no longer knows that it has ended", () => {
    expect(jobStateText("vanished")).toBe("ended, exit code not known");
    expect(jobStateText("running")).toBe("running");
  });

  it("lists settings by name, without empty ones", () => {
    expect(flatten({ a: { b: 1, c: null, d: [] }, e: "x", f: [1, 2], g: false })).toEqual([
      ["a.b", "1"],
      ["e", "x"],
      ["f", "[1,2]"],
      ["g", "false"],
    ]);
    expect(flatten(Object.fromEntries(Array.from({ length: 900 }, (_, index) => [index, 1])))).toHaveLength(
      500,
    );
  });
});

describe("headroom", () => {
  const tensor = (name: string, state: string, bits: number) => ({
    tensor: name,
    largest: 1,
    largest_step: 1,
    smallest: 1,
    smallest_step: 1,
    shares: [],
    formats: [{ format: "fp16", overflow_bits: bits, underflow_bits: 1, state }],
  });
  const headroom = {
    formats: [{ name: "fp16" }, { name: "bf16" }],
    tensors: [
      tensor("a", "ok", 3),
      tensor("b", "close", 0.5),
      tensor("c", "overflow", -2),
      tensor("d", "ok", 2),
    ],
  } as unknown as Schemas["HeadroomOutput"];

  it("ranks tensors by what goes wrong first", () => {
    expect(rowsOf(headroom, "fp16").map((row) => row.tensor)).toEqual(["c", "b", "d", "a"]);
    expect(countStates(headroom).fp16).toEqual({ overflow: 1, close: 1, underflow: 0, subnormal: 0, ok: 2 });
    expect(rowsOf(headroom, "bf16")).toEqual([]);
    expect(usualFormat(headroom)).toBe("fp16");
  });
});
