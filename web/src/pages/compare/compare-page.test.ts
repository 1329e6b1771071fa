import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import {
  comparisonColumns,
  isLogarithmic,
  linesOf,
  marksOf,
  nonfiniteNotes,
  positions,
} from "./compared-lines";
import { queryOf, viewOf, withTensor } from "./comparison-view";
import {
  describeDifference,
  differingTensors,
  equalSettings,
  searchResult,
  settingsOfRun,
} from "./differences";

type Divergence = Schemas["Divergence"];

const difference = (tensor: string, step: number): Schemas["FirstDifference"] => ({
  step,
  mode: "train",
  tensor,
  worker: 0,
  figure: "nan",
  a: 0,
  b: null,
  relative: null,
});
const divergence = (run: string, ...tensors: Schemas["FirstDifference"][]): Divergence => ({
  reference: "a",
  run,
  first: tensors[0] ?? null,
  tensors,
  compared_first: 0,
  compared_last: 9,
  tensors_left_out: 0,
  complete: true,
  rows: 10,
  only_reference: [],
  only_run: [],
  notes: [],
});
const series: Schemas["ComparedSeries"] = {
  tensor: "loss",
  figure: "mean",
  mode: "train",
  lines: [
    {
      run: "b",
      workers: 1,
      count: [1, 0, 1],
      mean: [1, null, null],
      min: [1, null, null],
      max: [1, null, null],
      nonfinite: [0, 0, 1],
    },
  ],
};

describe("the address", () => {
  it("holds the whole view", () => {
    const text = "runs=a,b&tensor=x%2Cy&tensor=z&figure=l2&from=3&to=9&log=0";
    const view = viewOf(new URLSearchParams(text));
    expect(view).toEqual({
      runs: ["a", "b"],
      tensors: ["x,y", "z"],
      figure: "l2",
      align: "step",
      from: 3,
      to: 9,
      logarithmic: false,
    });
    expect(viewOf(new URLSearchParams(queryOf(view)))).toEqual(view);
    expect(queryOf({ ...view, align: "time" })).not.toContain("from");
  });

  it("limits what is written by hand", () => {
    const runs = [..."aabcdefghij"].join(",");
    const view = viewOf(new URLSearchParams(`runs=,${runs}&align=no&from=-1&to=x`));
    expect([view.runs.length, view.runs[1], view.align, view.from, view.to]).toEqual([
      8,
      "b",
      "step",
      null,
      null,
    ]);
    expect(queryOf(viewOf(new URLSearchParams()))).toBe("");
  });

  it("shows the size of a layer's tensor that is added first", () => {
    const empty = viewOf(new URLSearchParams("runs=a,b"));
    expect(withTensor(empty, "1.weight:gradient").figure).toBe("l2");
    expect(withTensor(empty, "loss").figure).toBe("mean");
    const chosen = withTensor(withTensor(empty, "loss"), "1.weight");
    expect([chosen.tensors, chosen.figure]).toEqual([["loss", "1.weight"], "mean"]);
    expect(withTensor(chosen, "loss")).toBe(chosen);
  });
});

describe("lines", () => {
  it("have gaps where nothing was recorded, and where values are not finite", () => {
    const [line] = linesOf(series, ["a", "b"]);
    expect(line).toEqual({ label: "b", values: [1, null, null], colour: "--series-2", dashed: true });
    expect(nonfiniteNotes(series, { align: "step", edges: [0, 5, 6, 7] })).toEqual([
      "b: not finite from step 6 on",
    ]);
    expect(linesOf(series, ["a", "c", "b"])[0]!.dashed).toBe(false);
  });

  it("are placed at the middle of a column, in steps or seconds", () => {
    expect(positions({ align: "step", edges: [0, 1, 4] })).toEqual([0, 2]);
    expect(positions({ align: "time", edges: [0, 2_000_000_001] })).toEqual([1]);
  });

  it("are marked where their own tensor differs, otherwise where the run differs at all", () => {
    const divergences = [
      divergence("b", difference("x", 4), difference("loss", 7)),
      divergence("c", difference("x", 5)),
    ];
    expect(marksOf(series, [...divergences, divergence("d")])).toEqual([
      { x: 7, label: "b differs here first", tone: "fault" },
      { x: 5, label: "c differs in x", tone: "quiet" },
    ]);
    expect(isLogarithmic(series)).toBe(false);
    expect(Object.keys(comparisonColumns([series], { align: "step", edges: [0, 5, 6, 7] }))[2]).toBe(
      "b loss mean train",
    );
  });
});

describe("differences", () => {
  it("are described, with what limits them", () => {
    expect(describeDifference(difference("x", 4))).toBe("number of NaN none or not finite instead of 0");
    expect(searchResult(divergence("b"))).toBe("No difference in steps 0–9.");
    expect(searchResult({ ...divergence("b"), rows: 0 })).toContain("Nothing was compared");
    expect(searchResult({ ...divergence("b"), complete: false })).toContain("not complete");
    expect(searchResult({ ...divergence("b"), compared_last: -1 })).toContain("no step with common records");
    expect(searchResult(divergence("b", difference("x", 4)))).toBe("");
    expect(searchResult({ ...divergence("b", difference("x", 4)), complete: false })).toContain(
      "earlier differences",
    );
  });

  it("name the settings of a run that are not those of the reference, and what was compared", () => {
    const setting = (name: string, values: (string | number | null)[], step: number | null = null) => ({
      source: step === null ? ("environment" as const) : ("hyperparameter" as const),
      name,
      values,
      step,
    });
    const settings = {
      differing: [setting("rate", [0.001, 0.001, 0.1], 30), setting("commit", [null, "abc", null])],
      compared: { hyperparameter: 0, environment: 3, config: 9 },
    };
    const runs = ["a", "b", "c"].map((run) => ({ facts: { run } }));
    const comparison = { runs, settings } as unknown as Schemas["Comparison"];
    expect(settingsOfRun(comparison, "b")).toEqual(["commit abc instead of not set"]);
    expect(settingsOfRun(comparison, "c")).toEqual(["rate 0.1 instead of 0.001 from step 30 on"]);
    expect(equalSettings(settings)).toContain("no hyperparameter was recorded");
    expect(equalSettings({ ...settings, compared: { hyperparameter: 2 } })).toContain(
      "None: 2 hyperparameters",
    );
  });

  it("are joined by tensor, the earliest first", () => {
    const tensors = differingTensors([
      divergence("b", difference("x", 6), difference("y", 7)),
      divergence("c", difference("y", 3)),
    ]);
    expect(tensors.map(({ tensor, step, byRun }) => [tensor, step, [...byRun.keys()]])).toEqual([
      ["y", 3, ["b", "c"]],
      ["x", 6, ["b"]],
    ]);
  });
});
