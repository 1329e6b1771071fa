import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import { distanceOf, newestFirst } from "./before";
import { chartsOf, evidenceColumns, needsLogarithm, shownRange } from "./evidence";
import { barOf, describeDeviation, describeFinding, partOf, rankTensors } from "./layers";
import {
  headlineOf,
  inactionOf,
  otherRankOf,
  outcomeSentence,
  phaseSentence,
  roleOf,
  shorten,
  suspectsOf,
} from "./sentence";
import { labelChoices, matchersOf } from "./silence";

type AlertPage = Schemas["AlertPage"];
type EvidenceLine = Schemas["EvidenceLine"];

const finding = {
  step: 20,
  mode: "train",
  worker: 0,
  tensor: "fc.weight:gradient",
  module: "fc",
  module_type: "Linear",
  role: "gradient",
  value: 10,
  value_text: "10",
  threshold: 5,
  threshold_text: "5",
  message: "too large",
  time_ns: 0,
  upstream: ["model:input"],
  origin: "",
} satisfies Schemas["AlertFinding"];
const line = (changes: Partial<EvidenceLine> = {}): EvidenceLine => ({
  tensor: finding.tensor,
  figure: "l2",
  mode: "train",
  worker: 0,
  measures_value: true,
  step: [10, 15, 20],
  last_step: [10, 15, 20],
  time_ns: [null, null, null],
  mean: [1, 2, null],
  min: [1, 2, null],
  max: [1, 2, null],
  nonfinite: [0, 0, 1],
  ...changes,
});
const point = (step: number, tensor: string, value: number | null, threshold: number | null = 5) => ({
  step,
  tensor,
  worker: 0,
  value,
  threshold,
});

interface Parts {
  alert?: Partial<AlertPage["alert"]>;
  run?: Partial<AlertPage["run"]>;
  series?: Partial<AlertPage["series"]>;
  deviations?: Schemas["Deviation"][];
  stop?: Partial<Schemas["StopFacts"]> | null;
  others?: Partial<Schemas["OtherAlert"]>[];
  rule?: string;
  computation?: string[];
}
function pageOf(parts: Parts = {}): AlertPage {
  return {
    run: { state: "running", last_step: 22, workers: 1, ...parts.run },
    stop: parts.stop ?? null,
    alert: { fingerprint: "f", phase: "firing", step: 20, dry_run: false, inhibited_by: "", ...parts.alert },
    finding,
    rule: { config: { actions: [] }, rule: parts.rule ?? "exploding_gradient" },
    computation: parts.computation ?? [],
    series: {
      first: 0,
      last: 70,
      lines: [line()],
      findings: [],
      fixed_threshold: null,
      fixed_parameter: "",
      ...parts.series,
    },
    deviations: { deviations: parts.deviations ?? [], tensors_left_out: 0, superseded: false, problem: "" },
    silence: null,
    others: parts.others ?? [],
  } as unknown as AlertPage;
}

describe("sentences", () => {
  it("say what happened, from which step on and on which rank", () => {
    expect(headlineOf(pageOf())).toBe("Bad from step 20: too large.");
    const several = pageOf({ run: { workers: 2 }, alert: { since_step: 18 } });
    expect(headlineOf(several)).toBe("Bad from step 18 on rank 0: at step 20: too large.");
    expect(roleOf(finding)).toBe("gradient of module fc, Linear");
    expect(roleOf({ ...finding, module: "", role: "loss" })).toBe("loss");
  });

  it("name the rank whose tensor is the first that is not finite", () => {
    const input = {
      tensor: "model:input",
      statistic: "nonfinite_share",
      worker: 1,
      step: 20,
      value: 0.001,
      low: 0,
      high: 0,
      spreads: 1e6,
    };
    const parts = { deviations: [input], computation: ["model:input", "fc.weight:gradient"] };
    expect(otherRankOf(pageOf({ ...parts, run: { workers: 2 } }))).toBe(
      "In the order of the computation, model:input of rank 1 is the first with NaN or infinity.",
    );
    expect(otherRankOf(pageOf(parts))).toBe("");
    expect(
      otherRankOf(pageOf({ ...parts, run: { workers: 2 }, deviations: [{ ...input, worker: 0 }] })),
    ).toBe("");
  });

  it("say what became of the run", () => {
    const own = { fingerprint: "f", step: 25, outcome: "the job is gone" };
    expect(outcomeSentence(pageOf({ run: { state: "stopped" }, stop: { ...own, state: "done" } }))).toBe(
      "The alert stopped the run; it ended after step 22, 3 steps lost.",
    );
    expect(outcomeSentence(pageOf({ run: { state: "stopped" }, stop: null }))).toBe(
      "The recorder stopped the run before the update of step 22.",
    );
    expect(outcomeSentence(pageOf({ run: { state: "completed" }, stop: { ...own, state: "done" } }))).toBe(
      "It requested a stop: the job is gone. The run was not stopped by it: it completed, and ended after step 22.",
    );
    expect(outcomeSentence(pageOf({ stop: { ...own, state: "done" } }))).toBe(
      "It requested a stop: the job is gone. The run goes on, at step 22.",
    );
    expect(outcomeSentence(pageOf({ run: { state: "lost" }, stop: { ...own, state: "done" } }))).toContain(
      "it was lost, and ended after step 22",
    );
    expect(outcomeSentence(pageOf({ stop: { ...own, state: "failed" } }))).toContain(
      "which failed: the job is",
    );
    expect(outcomeSentence(pageOf({ stop: { ...own, state: "pending" } }))).toContain("being carried out");
    expect(outcomeSentence(pageOf())).toBe("The run goes on, at step 22. This alert stopped nothing.");
    const other = { fingerprint: "g", step: null };
    expect(
      outcomeSentence(
        pageOf({
          run: { state: "stopped" },
          stop: other,
          others: [{ fingerprint: "g", name: "loss_spike" }],
        }),
      ),
    ).toBe("The run was stopped by loss_spike; it ended after step 22, 3 steps lost.");
    expect(outcomeSentence(pageOf({ run: { state: "completed" }, alert: { dry_run: true } }))).toContain(
      "dry run",
    );
  });

  it("say whether it still fires, and why nothing was done", () => {
    expect(phaseSentence(pageOf())).toBe("It still fires.");
    expect(phaseSentence(pageOf({ run: { state: "stopped" } }))).toBe("It fired until the run ended.");
    expect(phaseSentence(pageOf({ alert: { phase: "resolved", step: 40 } }))).toBe(
      "It was resolved at step 40.",
    );
    expect(inactionOf(pageOf({ alert: { inhibited_by: "nan_or_inf" } }))).toContain("nan_or_inf explains");
    expect(inactionOf(pageOf())).toContain("neither stops the run");
  });

  it("shorten names that are too long for a sentence", () => {
    expect(shorten("short")).toBe("short");
    expect(shorten("a".repeat(4000) + "end", 30)).toBe(`${"a".repeat(19)}…${"a".repeat(7)}end`);
  });

  it("name the first bad tensor first, and each once", () => {
    expect(suspectsOf({ ...finding, upstream: ["a", "b", "a"], origin: finding.tensor })).toEqual(["a", "b"]);
  });
});

describe("evidence", () => {
  it("draws a fixed threshold across the whole window", () => {
    const [chart] = chartsOf(pageOf({ series: { fixed_threshold: 5, fixed_parameter: "most" } }));
    expect(chart!.x).toEqual([0, 10, 11, 15, 16, 20, 70]);
    expect(chart!.series.map(({ values }) => values)).toEqual([
      [null, 1, null, 2, null, null, null],
      [5, 5, 5, 5, 5, 5, 5],
    ]);
    expect(chart!.series[1]!.label).toBe("threshold (most)");
    expect(chart!.nonfinite).toEqual([[20, 20]]);
  });

  it("draws stored thresholds at their steps, of the same tensor and worker only", () => {
    const findings = [
      point(15, finding.tensor, 2, 1),
      point(15, "other", 9, 9),
      point(20, finding.tensor, 3, 1.5),
    ];
    const page = pageOf({ series: { findings } });
    expect(chartsOf(page)[0]!.series[1]!.values).toEqual([null, null, 1, null, 1.5]);
    expect(evidenceColumns(page).threshold).toEqual([null, 1, 1.5]);
  });

  it("draws the findings themselves if no recorded figure is what the rule compares", () => {
    const findings = [point(15, finding.tensor, 2, 1), point(20, finding.tensor, 3, 1)];
    const charts = chartsOf(pageOf({ series: { findings, lines: [line({ measures_value: false })] } }));
    expect(charts.map(({ key, measured }) => [key === "findings", measured])).toEqual([
      [true, true],
      [false, false],
    ]);
    expect(chartsOf(pageOf({ series: { lines: [] } }))).toEqual([]);
  });

  it("shows the window up to the last recorded step, and chooses a logarithm for wide ranges", () => {
    expect(shownRange(pageOf())).toEqual([0, 23]);
    expect(shownRange(pageOf({ run: { last_step: 10 } }))).toEqual([0, 21]);
    expect(needsLogarithm([1, 1, 1, 1e6])).toBe(true);
    expect(needsLogarithm([0, 1, 1e6])).toBe(false);
    expect(needsLogarithm([1, 2, null])).toBe(false);
  });
});

describe("layers", () => {
  const deviation = (tensor: string, spreads: number): Schemas["Deviation"] => ({
    tensor,
    statistic: "rms",
    worker: 0,
    step: 20,
    value: 7,
    low: 1,
    high: 2,
    spreads,
  });

  it("are ranked by deviation, then by what the rule found, one entry per parameter", () => {
    const findings = [
      point(20, "a.weight:exp_avg:finite_check", 3),
      point(20, "a.weight:gradient", 3),
      point(20, "b.weight:gradient", 100),
      point(19, "c:output", 6),
      point(20, "loss", 8),
      point(21, "later", 1000),
    ];
    const ranked = rankTensors(pageOf({ series: { findings }, deviations: [deviation("loss", 12)] }));
    expect(ranked.map(({ tensor }) => tensor)).toEqual([
      "loss",
      "c:output",
      "b.weight:gradient",
      "a.weight:gradient",
    ]);
    expect(ranked[0]!.finding).toEqual({ value: 8, threshold: 5 });
    expect(ranked[3]!.related).toEqual(["a.weight:exp_avg:finite_check"]);
    expect(["a.weight:exp_avg:finite_check", "a.weight:finite_check"].map(partOf)).toEqual([
      "exp_avg",
      "value",
    ]);
  });

  it("with NaN are in the order of the computation, whatever their size", () => {
    const findings = [
      point(20, "large.weight:gradient", 1e6),
      point(20, "small.weight:gradient", 2),
      point(19, "late.weight:gradient", 1),
    ];
    const nan = { ...deviation("out:output", 1e6), statistic: "nonfinite_share", value: 0.01 };
    const computation = [
      "out:output",
      "small.weight:gradient",
      "large.weight:gradient",
      "late.weight:gradient",
    ];
    const page = pageOf({
      rule: "nan_or_inf",
      computation,
      series: { findings },
      deviations: [deviation("loss", 9), nan],
    });
    expect(rankTensors(page).map(({ tensor }) => tensor)).toEqual([
      "late.weight:gradient",
      "out:output",
      "small.weight:gradient",
      "large.weight:gradient",
      "loss",
    ]);
    expect(describeFinding({ value: 49152, threshold: 0 }, true)).toBe("49,152 elements are not finite");
  });

  it("are described in words", () => {
    expect(describeDeviation(deviation("loss", 12.3))).toBe(
      "root mean square 7, usually 1 to 2; 12 deviations off",
    );
    expect(describeDeviation({ ...deviation("loss", 1e6), statistic: "nonfinite_share", value: 1 })).toBe(
      "100 % of its values are not finite",
    );
    expect(describeFinding({ value: null, threshold: null })).toBe("the rule measured not finite");
    expect(barOf(deviation("loss", 1e6))).toBe(1);
    expect(barOf(deviation("loss", 1))).toBe(0.02);
  });
});

describe("what happened before", () => {
  const event = (step: number | null, at: number | null): Schemas["PriorEvent"] => ({
    kind: "event",
    step,
    at_ns: at,
    title: "",
    fingerprint: "",
    before: null,
    after: null,
  });

  it("is ordered by time, and its distance is in steps if it has one", () => {
    const events = [event(3, 30), event(null, 90), event(9, null), event(8, 60)];
    expect(newestFirst(events).map(({ at_ns }) => at_ns)).toEqual([90, 60, 30, null]);
    expect(distanceOf(event(19, 0), 20, 0)).toBe("1 step before");
    expect(distanceOf(event(20, 0), 20, 0)).toBe("same step");
    expect(distanceOf(event(null, 0), 20, 3e9)).toBe("3 s before");
    expect(distanceOf(event(null, null), 20, 0)).toBe("");
  });
});

describe("matchers of a silence", () => {
  it("are the chosen labels, quoted, and the written lines", () => {
    const choices = labelChoices({
      project: "p",
      team: "ml",
      name: 'a"b\\c',
      run: "r",
      rule: "x",
      severity: "info",
    });
    expect(choices.map(({ label, chosen }) => [label, chosen])).toEqual([
      ["run", true],
      ["name", true],
      ["rule", false],
      ["severity", false],
      ["team", false],
    ]);
    expect(matchersOf(choices, new Set(["name"]), ' team=~"ml|x" \n\n')).toEqual([
      'name="a\\"b\\\\c"',
      'team=~"ml|x"',
    ]);
  });
});
