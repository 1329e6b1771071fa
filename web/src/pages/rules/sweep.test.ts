import { describe, expect, it } from "vitest";
import { fieldsOf } from "./parameters";
import {
  advice,
  readReport,
  splitOf,
  suggestedRange,
  sweepText,
  valuesOf,
  variedOf,
  withInhibitors,
  type Varied,
} from "./sweep";

const FREE: Varied = {
  name: "t",
  whole: false,
  low: 0,
  high: null,
  lowOpen: true,
  highOpen: false,
  current: 1e-7,
};

describe("the values of a sweep", () => {
  it("begin around the present value, within the bounds", () => {
    expect(suggestedRange(FREE)).toEqual({ from: 1e-9, to: 1e-5, values: 15 });
    expect(suggestedRange({ ...FREE, high: 1, current: 0.9, lowOpen: false })).toEqual({
      from: 0.05,
      to: 0.95,
      values: 15,
    });
    expect(suggestedRange({ ...FREE, low: 1, current: 2 }).from).toBeGreaterThan(1);
    expect(suggestedRange({ ...FREE, whole: true, low: 1, lowOpen: false, current: 2 })).toEqual({
      from: 1,
      to: 8,
      values: 8,
    });
  });

  it("are spaced geometrically over two decades, else evenly; whole numbers for whole parameters", () => {
    expect(valuesOf({ from: 1, to: 1000, values: 4 }, false)).toEqual([1, 10, 100, 1000]);
    expect(valuesOf({ from: 0, to: 1, values: 5 }, false)).toEqual([0, 0.25, 0.5, 0.75, 1]);
    expect(valuesOf({ from: 3, to: 1, values: 9 }, true)).toEqual([1, 2, 3]);
    expect(valuesOf({ from: 1, to: 2, values: 1000 }, false).length).toBe(60);
    expect(valuesOf({ from: NaN, to: 2, values: 3 }, false)).toEqual([]);
    expect(sweepText("a.b", "t", [1e-9, 0.5])).toBe("a.b.t=1e-9,0.5");
  });

  it("are of numeric parameters, and of the duration", () => {
    const fields = fieldsOf({
      properties: {
        a: { type: "number", default: 2 },
        b: { type: "boolean" },
        c: { anyOf: [{ type: "integer" }, { type: "null" }] },
      },
    });
    const varied = variedOf(fields, { a: 3, c: null }, { for: { steps: 5 } });
    expect(varied.map(({ name, current }) => [name, current])).toEqual([
      ["a", 3],
      ["for", 5],
    ]);
  });
});

it("evaluates the rules that may inhibit the tested one too", () => {
  const others = [
    { rule: "nan_or_inf", inhibits: ["exploding_gradient", "dead_relu"] },
    { rule: "x", name: "top", inhibits: ["nan_or_inf"] },
    { rule: "exploding_gradient" },
    { rule: "overfit", inhibits: ["mine"] },
  ];
  expect(withInhibitors({ rule: "exploding_gradient", params: { growth: 2 } }, others)).toEqual([
    { rule: "exploding_gradient", params: { growth: 2 } },
    { rule: "nan_or_inf", inhibits: ["exploding_gradient"] },
    { rule: "x", name: "top", inhibits: ["nan_or_inf"] },
  ]);
});

function report(fired: Record<string, (number | null)[]>, answers: Record<string, string> = {}) {
  const values = [1, 10, 100];
  const first = (step: number | null) =>
    step === null ? null : { attempt: "a", step, config: "r.x", tensor: "w" };
  return readReport({
    sweep: values.map((value) => ({ settings: { "r.x.growth": value }, current: value === 10, fired: [] })),
    runs: Object.entries(fired).map(([run, steps]) => ({
      run,
      fired: steps.map(first),
      was_right: run in answers ? { "r.x": answers[run] } : {},
      attempts: [{ notes: ["n"], rules: [{ rule_config: { name: "r.x", rule: "q" } }] }],
    })),
    failed: [{ what: "run z", hint: "h" }],
  })!;
}
const STATES = new Map([
  ["good", "completed"],
  ["fine", "completed"],
  ["bad", "stopped"],
]);

describe("a report", () => {
  it("says which runs each value alerts on, and when", () => {
    const read = report({ good: [3, null, null], bad: [2, 4, null] });
    expect([read.config, read.parameter, read.runs, read.tested?.["rule"]]).toEqual([
      "r.x",
      "growth",
      ["good", "bad"],
      "q",
    ]);
    expect(read.values.map(({ value, current, alerts }) => [value, current, [...alerts.keys()]])).toEqual([
      [1, false, ["good", "bad"]],
      [10, true, ["bad"]],
      [100, false, []],
    ]);
    expect(read.values[1]!.alerts.get("bad")).toEqual({ attempt: "a", step: 4, tensor: "w" });
    expect([read.failed.length, read.notes]).toEqual([1, ["n"]]);
    expect(readReport(null)).toBeNull();
    expect(readReport({ sweep: [], runs: [] })).toBeNull();
  });

  it("says where another rule explains the alert", () => {
    const firing = { phase: "firing", step: 7, inhibited_by: "top" };
    const rules = [
      { rule_config: { name: "r" }, transitions: [{ phase: "pending", inhibited_by: "" }, firing] },
    ];
    const read = readReport({
      sweep: [{ settings: { "r.x": 1 }, current: true, fired: [] }],
      runs: [{ run: "bad", fired: [null], attempts: [{ rules }] }],
    });
    expect([...read!.inhibited]).toEqual([["bad", { by: "top", step: 7 }]]);
  });

  it("names the values that tell the runs apart by what people said of their alerts", () => {
    const say = (fired: Record<string, (number | null)[]>, answers: Record<string, string> = {}) =>
      advice(report(fired, answers), STATES, String);
    const wrong = { good: "no", fine: "no" };
    expect(say({ good: [3, null, null], fine: [9, null, null], bad: [2, 4, 5] }, wrong)).toBe(
      "Best here: 10 to 100 – alerts on 1 of 1 run with a fault and on none of 2 whose alert was not right.",
    );
    expect(say({ good: [3, 3, 4], bad: [2, null, null] }, wrong)).toContain(
      "Best here: 1 – alerts on 1 of 1 run",
    );
    expect(say({ good: [3, 3, 4], bad: [null, null, null] })).toContain(
      "No value alerts on the run with a fault",
    );
    expect(say({ good: [3, 3, null], fine: [2, null, null] }, { good: "yes", fine: "no" })).toContain(
      "Best here: 10 –",
    );
  });

  it("calls no alert wrong because its run completed", () => {
    const read = report({ good: [1, 1, 2], fine: [1, null, null] }, { fine: "not_sure" });
    expect(splitOf(read.values[0]!, read, STATES)).toEqual({ fault: 0, wrong: 0, open: 2 });
    expect(advice(read, STATES, String)).toBe(
      "There is no run to compare with. Of 2 runs nobody has said whether an alert is right: answer on the page of the alert.",
    );
  });
});
