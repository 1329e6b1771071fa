import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import { alertsOf, verdictOf } from "./verdict";

type Overview = Schemas["RunOverview"];

const mark = (
  fingerprint: string,
  step: number,
  changes: Partial<Schemas["RunMark"]> = {},
): Schemas["RunMark"] => ({
  id: `${fingerprint} ${step}`,
  type: "io.watchstep.alert.firing",
  at_ns: step,
  step,
  attempt: "a1",
  superseded: false,
  since_step: step,
  worker: 1,
  title: `${fingerprint} fires: it is bad`,
  severity: "warning",
  name: fingerprint,
  fingerprint,
  tensor: `${fingerprint}.weight`,
  causes: [],
  inhibited_by: "",
  ...changes,
});
const lane = (name: string, phase = "firing", severity = "warning"): Schemas["RuleLane"] => ({
  name,
  rule: name,
  severity,
  origin: "owner",
  fingerprint: phase === "inactive" ? "" : name,
  phase,
  health: "ok",
  problem: "",
  intervals: [],
});
function overview(run: Partial<Overview["run"]>, parts: Partial<Omit<Overview, "run">> = {}): Overview {
  return {
    run: { state: "running", last_step: 99, workers: 1, reason: "", ...run },
    stop: null,
    marks: [],
    lanes: [],
    ...parts,
  } as Overview;
}
const stop = (changes: Partial<Schemas["StopFacts"]> = {}): Schemas["StopFacts"] => ({
  attempt: "a1",
  reason: "asked for",
  step: null,
  event: "",
  fingerprint: null,
  state: "done",
  outcome: "",
  requested_ns: null,
  finished_ns: null,
  ...changes,
});

describe("the verdict on a run", () => {
  it("names step, rule and first bad tensor of a run that a rule stopped", () => {
    const view = overview(
      { state: "stopped" },
      {
        stop: stop({ fingerprint: "nan", step: 95 }),
        lanes: [lane("late", "firing", "critical"), lane("nan", "resolved", "critical")],
        marks: [mark("nan", 90, { since_step: 88, causes: ["model:input"] }), mark("late", 91)],
      },
    );
    const verdict = verdictOf(view);
    expect(verdict.title).toBe("Bad from step 88, stopped by nan, ended after step 99, 12 steps lost");
    expect(verdictOf({ ...view, run: { ...view.run, workers: 2 } }).title).toContain(
      "Bad from step 88 on rank 1, stopped",
    );
    expect([verdict.tone, verdict.reason]).toEqual(["fault", "it is bad"]);
    expect([verdict.main?.causes, verdict.main?.tensor]).toEqual([["model:input"], "nan.weight"]);
    expect(verdict.others.map((alert) => alert.name)).toEqual(["late"]);
    expect(verdict.notes).toEqual([]);
  });

  it("says what every other state means", () => {
    const title = (run: Partial<Overview["run"]>, parts = {}): string =>
      verdictOf(overview(run, parts)).title;
    const firing = { lanes: [lane("a")], marks: [mark("a", 5)] };
    const resolved = { lanes: [lane("a", "resolved")], marks: [mark("a", 5)] };
    expect(title({ state: "stopped" }, { stop: stop() })).toBe("Stopped, ended after step 99");
    expect(verdictOf(overview({ state: "stopped" }, { stop: stop() })).reason).toBe("asked for");
    expect(title({ state: "failed", reason: "out of memory" })).toBe("Failed, ended after step 99");
    expect(title({ state: "lost" })).toBe("Lost, ended after step 99");
    expect(title({ state: "completed" })).toBe("Completed, ended after step 99, without an alert");
    expect(title({ state: "completed" }, resolved)).toBe(
      "Completed, ended after step 99; every alert was resolved",
    );
    expect(title({ state: "completed" }, firing)).toBe(
      "Completed, ended after step 99, but one alert fires: a, bad from step 5",
    );
    expect(title({ state: "completed", workers: 2 }, firing)).toContain("a, bad from step 5 on rank");
    const critical = { lanes: [lane("a", "firing", "critical")], marks: [mark("a", 5)] };
    const toneOf = (parts: object): string => verdictOf(overview({ state: "completed" }, parts)).tone;
    expect([toneOf(firing), toneOf(critical)]).toEqual(["warning", "fault"]);
    expect(title({ state: "created", last_step: -1 })).toBe("Registered, no data yet");
    expect(title({ last_step: -1 })).toBe("Running, no step yet: no alert");
    expect(title({}, firing)).toBe("Running, step 99: one alert fires");
    expect(title({}, resolved)).toBe("Running, step 99: every alert was resolved");
  });

  it("says what became of a stop that had no effect", () => {
    const view = overview(
      { state: "completed" },
      { stop: stop({ state: "skipped", outcome: "it had ended" }) },
    );
    expect(verdictOf(view).notes).toEqual(["A stop was requested, but had no effect: it had ended."]);
    const done = overview(
      { state: "completed" },
      { stop: stop({ state: "done", outcome: "it ended by itself" }) },
    );
    expect(verdictOf(done).notes).toEqual(["A stop was requested: it ended by itself."]);
  });

  it("puts firing alerts first, causes before what follows from them, then severity and step", () => {
    const view = overview(
      {},
      {
        lanes: [
          lane("old", "resolved", "critical"),
          lane("effect", "firing", "critical"),
          lane("late"),
          lane("early"),
          lane("calm", "inactive"),
        ],
        marks: [
          mark("effect", 1, { inhibited_by: "early" }),
          mark("late", 9),
          mark("early", 4),
          mark("old", 0),
          mark("early", 6),
        ],
      },
    );
    expect(alertsOf(view).map((alert) => alert.name)).toEqual(["early", "late", "effect", "old"]);
    expect(alertsOf(view)[0]?.step).toBe(6);
  });

  it("uses a revised finding, and ignores what a later attempt repeated", () => {
    const revised = mark("a", 8, {
      type: "io.watchstep.alert.revised",
      title: "a, likelier cause: another",
      tensor: "first.weight",
    });
    const view = overview(
      {},
      { lanes: [lane("a")], marks: [mark("a", 7), revised, mark("a", 3, { superseded: true, tensor: "x" })] },
    );
    expect(alertsOf(view)[0]).toMatchObject({ step: 7, tensor: "first.weight", message: "another" });
  });
});
