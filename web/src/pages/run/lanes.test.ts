import { describe, expect, it } from "vitest";
import type { Schemas } from "../../api/client";
import { groupMarks, isNotable, partsOf } from "./lanes";

const interval = (state: Schemas["LaneInterval"]["state"], first: number, last: number | null) => ({
  state,
  first,
  last,
  attempt: "a",
  from_ns: null,
  message: "",
});
const lane = (...intervals: Schemas["LaneInterval"][]): Schemas["RuleLane"] => ({
  name: "r",
  rule: "r",
  severity: "warning",
  origin: "owner",
  fingerprint: "f",
  phase: "firing",
  health: "ok",
  problem: "",
  intervals,
});

describe("lanes", () => {
  it("shows the part of each state that the axis shows, and short ones at least three pixels wide", () => {
    const axis = { first: 100, end: 200 };
    const parts = partsOf(
      lane(interval("ok", 0, 149), interval("firing", 150, 150), interval("resolved", 151, null)),
      axis,
      100,
    );
    expect(parts.map((part) => [part.state, part.left, part.width])).toEqual([
      ["ok", 0, 50],
      ["resolved", 51, 49],
      ["firing", 50, 3],
    ]);
    expect(partsOf(lane(interval("firing", 0, 99), interval("ok", 200, null)), axis, 100)).toEqual([]);
    const [last] = partsOf(lane(interval("firing", 199, null)), axis, 100);
    expect(last!.left + last!.width).toBeLessThanOrEqual(100);
  });

  it("tells quiet rules from those that deserve a look", () => {
    expect(isNotable(lane(interval("ok", 0, null)))).toBe(false);
    expect(isNotable(lane(interval("no_data", 0, null)))).toBe(false);
    expect(isNotable(lane(interval("ok", 0, 4), interval("pending", 5, null)))).toBe(true);
    expect(isNotable({ ...lane(), health: "error" })).toBe(true);
  });

  it("draws marks that are close together as the one that matters most", () => {
    const mark = (id: string, type: string, step: number | null): Schemas["RunMark"] =>
      ({ id, type, step, severity: "" }) as Schemas["RunMark"];
    const marks = [
      mark("a", "attempt.started", 50),
      mark("b", "io.watchstep.alert.firing", 51),
      mark("c", "io.watchstep.alert.resolved", 90),
      mark("d", "io.watchstep.alert.firing", null),
      mark("e", "io.watchstep.alert.firing", 300),
    ];
    const groups = groupMarks(marks, (entry) => entry.step, { first: 0, end: 100 }, 1000);
    expect(groups.map((group) => [group.main.id, group.marks.length, group.symbol])).toEqual([
      ["b", 2, "alert"],
      ["c", 1, "resolved"],
    ]);
  });
});
