import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import {
  labelledBins,
  nearestPlace,
  negativeBins,
  placesOfRows,
  recordAt,
  recordsOf,
  thinned,
  whoseElements,
} from "./distribution";
import { axisOf, FORMAT_RANGES, placeOf, ticksOf } from "./format-range";
import { observationsOf, problemsOf, verdictOf } from "./problems";
import { chartOf, measures, parseFigures, usualFigures } from "./series";

type Page = Schemas["TensorPage"];
type Alert = Schemas["AlertOutput"];

const finding = (step: number, value: number | null = 5, threshold: number | null = 1) => ({
  attempt: "a1",
  step,
  mode: "train",
  worker: 0,
  value,
  threshold,
  message: `bad at ${step}`,
});
const rule = (name: string, steps: number[] = [], extra = {}) => ({
  name,
  rule: name,
  severity: "warning" as const,
  thresholds: [],
  findings: steps.map((step) => finding(step)),
  left_out: 0,
  ...extra,
});
const line = (step: number[], mean: (number | null)[], extra = {}) => ({
  mode: "train",
  worker: 0,
  replica: 0,
  stage: "local",
  step,
  last_step: step,
  count: step.map(() => 1),
  mean,
  min: mean,
  max: mean,
  nonfinite: mean.map((value) => (value === null ? 1 : 0)),
  ...extra,
});
const HISTOGRAM = {
  tensor: "w:gradient",
  edges: [0, 10, 20, 30, 40],
  lower: [-2, 1],
  upper: [-1, 2],
  counts: [
    [3, 5],
    [0, 0],
    [2, 2],
    [0, 0],
  ],
  zeros: [2, 0, 4, 0],
  nonfinite: [0, 0, 0, 6],
  first: [0, -1, 20, 31],
  last: [9, -1, 29, 39],
};
const page = (changes: Partial<Page> = {}): Page =>
  ({
    tensor: { name: "w:gradient", role: "gradient", shape: [10], dtype: "float32" },
    rules: [],
    histogram: null,
    series: [],
    headroom: {
      largest: 1,
      largest_step: 0,
      smallest: 1,
      smallest_step: 0,
      formats: [],
      shares: [],
      tensor: "",
    },
    ...changes,
  }) as unknown as Page;
const alert = (name: string, tensor: string, extra = {}): Alert =>
  ({
    name,
    severity: "critical",
    phase: "firing",
    fingerprint: `f-${name}`,
    since_step: 7,
    finding: { tensor, step: 7, message: "m", ...extra },
  }) as unknown as Alert;

describe("what is wrong with a tensor", () => {
  it("joins findings with their alerts, the firing and severe ones first", () => {
    const problems = problemsOf(page({ rules: [rule("a", [12, 9]), rule("quiet"), rule("b", [3])] }), [
      alert("a", "other"),
      alert("c", "w:gradient"),
      alert("d", "other"),
      alert("e", "other", { upstream: ["w:gradient"] }),
    ]);
    expect(problems.map((problem) => [problem.name, problem.first, problem.last, problem.phase])).toEqual([
      ["c", 7, 7, "firing"],
      ["e", 7, 7, "firing"],
      ["a", 9, 12, "firing"],
      ["b", 3, 3, ""],
    ]);
    expect(problems.find((problem) => problem.name === "a")).toMatchObject({
      elsewhere: "other",
      fingerprint: "f-a",
      relation: "here",
    });
    expect(problems.find((problem) => problem.name === "e")?.relation).toBe("origin");
  });

  it("says so in a sentence", () => {
    const said = (changes: Partial<Page>, alerts: Alert[] = []): [string, string] => {
      const view = page(changes);
      const verdict = verdictOf(view, problemsOf(view, alerts), observationsOf(view));
      return [verdict.tone, verdict.title];
    };
    expect(said({})).toEqual(["quiet", "No rule watches this tensor"]);
    expect(said({ rules: [rule("a")] })[0]).toBe("ok");
    expect(said({ rules: [rule("a", [4]), rule("b", [5])] }, [alert("a", "w:gradient")])).toEqual([
      "warning",
      "Bad from step 4: a and another rule",
    ]);
    expect(said({}, [alert("a", "w:gradient")])[0]).toBe("fault");
    expect(said({ histogram: HISTOGRAM })[1]).toContain("No rule reported");
  });

  it("sees what no rule watches for", () => {
    expect(observationsOf(page({ histogram: HISTOGRAM }))).toEqual([
      { tone: "fault", text: "NaN or infinite: 6 of 6 elements at steps 31–39.", step: 31 },
    ]);
    const zeros = {
      ...HISTOGRAM,
      counts: [
        [5, 5],
        [0, 0],
        [0, 0],
        [0, 0],
      ],
      zeros: [0, 0, 4, 4],
      nonfinite: [0, 0, 0, 0],
    };
    expect(observationsOf(page({ histogram: zeros }))[0]?.text).toBe(
      "Every element is zero from step 20 on.",
    );
    const dying = {
      ...HISTOGRAM,
      counts: [
        [5, 5],
        [0, 0],
        [0, 1],
        [0, 0],
      ],
      zeros: [0, 0, 99, 0],
      nonfinite: [0, 0, 0, 0],
    };
    expect(observationsOf(page({ histogram: dying }))[0]?.text).toContain(
      "99 % of the elements are zero at steps 20–29",
    );
    const grown = {
      ...HISTOGRAM,
      lower: [1, 4096],
      upper: [2, 8192],
      counts: [
        [9, 0],
        [0, 0],
        [0, 9],
        [0, 0],
      ],
      zeros: [0, 0, 0, 0],
      nonfinite: [0, 0, 0, 0],
    };
    expect(observationsOf(page({ histogram: grown }))[0]?.text).toMatch(/^A typical magnitude grew from/);
  });
});

describe("the distribution over the steps", () => {
  it("selects the nearest record of a step that was not measured", () => {
    const places = Int32Array.from([0, -1, -1, -1, 1, -1]);
    expect([0, 1, 2, 3, 4, 5].map((row) => nearestPlace(places, row))).toEqual([0, 0, 0, 1, 1, 1]);
    expect(nearestPlace(Int32Array.from([-1, -1]), 1)).toBe(-1);
  });

  it("finds records, and leaves rows empty that were not measured", () => {
    const records = recordsOf(HISTOGRAM);
    expect(records.map((record) => [record.row, record.first, record.last, record.total])).toEqual([
      [0, 0, 9, 10],
      [2, 20, 29, 8],
      [3, 31, 39, 6],
    ]);
    expect([...placesOfRows(HISTOGRAM, records)]).toEqual([0, -1, 1, 2]);
    expect([null, -5, 0, 15, 20, 99].map((step) => recordAt(records, step))).toEqual([2, 0, 0, 0, 1, 2]);
    expect(recordAt([], 3)).toBe(-1);
    expect(negativeBins(HISTOGRAM)).toBe(1);
  });

  it("thins records evenly, and keeps the first, the last and the selected one", () => {
    const records = Array.from({ length: 100 }, (_, row) => ({ row, first: row, last: row, total: 1 }));
    const chosen = thinned(records, 10, 33);
    expect(chosen.length).toBeLessThanOrEqual(10);
    expect(chosen).toEqual(expect.arrayContaining([0, 33, 99]));
    expect(thinned(records.slice(0, 3), 10, 1)).toEqual([0, 1, 2]);
    expect(labelledBins(6, 2, 3)).toEqual([0, 5, 3]);
  });
});

describe("charts of statistics", () => {
  it("joins lines by step, and dashes thresholds", () => {
    const figures = {
      figure: "l2",
      lines: [line([0, 2], [1, 2]), line([1, 2], [3, null], { worker: 1 })],
      left_out: 0,
    };
    const threshold = { figure: "l2", parameter: "t", value: 1.5, side: "above" as const };
    const far = { ...threshold, value: 1e9 };
    const view = page({
      rules: [rule("near", [], { thresholds: [threshold] }), rule("far", [], { thresholds: [far] })],
    } as Partial<Page>);
    const chart = chartOf(view, figures, "auto");
    expect(chart.x).toEqual([0, 1, 2]);
    expect(chart.series.map((series) => [series.label, series.values])).toEqual([
      ["worker 0", [1, null, 2]],
      ["worker 1", [null, 3, null]],
      ["near above 1.5", [1.5, 1.5, 1.5]],
    ]);
    expect(chart.notes).toEqual([
      "The record of step 2 has no finite value.",
      "Outside of the chart: far above 1000000000.",
    ]);
  });

  it("chooses the scale", () => {
    const wide = { figure: "l2", lines: [line([0, 1, 2], [1, 1, 1000])], left_out: 0 };
    expect(chartOf(page(), wide, "auto").logarithmic).toBe(true);
    expect(chartOf(page(), wide, "linear").logarithmic).toBe(false);
    const signed = { figure: "mean", lines: [line([0, 1], [-1, -1000])], left_out: 0 };
    expect(chartOf(page(), signed, "auto").logarithmic).toBe(false);
    expect(chartOf(page(), signed, "log").notes).toContain("Not logarithmic: no value is positive.");
  });

  it("draws the thresholds of findings only in the statistic that the rule measures", () => {
    const l2 = { figure: "l2", lines: [line([0, 1, 2], [1, 5, 1])], left_out: 0 };
    expect(measures(l2, [finding(1)])).toBe(true);
    expect(measures(l2, [finding(1), finding(2)])).toBe(false);
    expect(measures(l2, [finding(77)])).toBe(false);
    expect(measures(l2, [finding(1, 5, null)])).toBe(false);
    const binned = line([0], [3], { last_step: [9], min: [1], max: [5], count: [10] });
    expect(measures({ ...l2, lines: [binned] }, [finding(4), finding(5, 2)])).toBe(true);
    expect(measures({ ...l2, lines: [binned] }, [finding(4, 3)])).toBe(false);
  });

  it("shows what fits the tensor", () => {
    expect(usualFigures("a:gradient")).toContain("abs_mean");
    expect(usualFigures("a:output")).toContain("zero_share");
    expect(parseFigures("l2,,l2,mean")).toEqual(["l2", "mean"]);
  });
});

it("places magnitudes in the ranges of number formats", () => {
  expect(axisOf({ largest: null, smallest: null })).toEqual({ low: -32, high: 20 });
  const axis = axisOf({ largest: 2 ** 30, smallest: 2 ** -50 });
  expect(axis).toEqual({ low: -54, high: 34 });
  expect([placeOf(axis, -149), placeOf(axis, -10), placeOf(axis, 128)]).toEqual([0, 0.5, 1]);
  expect(ticksOf(axis, 9).length).toBeGreaterThan(3);
  for (const range of FORMAT_RANGES) {
    expect(range.smallest).toBeLessThan(range.normal);
    expect(range.normal).toBeLessThan(range.largest);
  }
});

describe("distributions of several workers", () => {
  it("say whose elements they show", () => {
    expect(whoseElements([0], "")).toBe("");
    expect(whoseElements([0, 1], "")).toContain("first replica only");
    expect(whoseElements([0, 1], "separate")).toContain("first replica only");
    expect(whoseElements([0, 1], "1")).toBe("Of worker 1.");
  });
});
