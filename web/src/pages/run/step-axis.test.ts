import { describe, expect, it } from "vitest";
import { axisOf, columnOf, middles, nameOfColumn, shareOf, stepAt, stepAtTime } from "./step-axis";

describe("step axis", () => {
  it("finds the step of each place, and the place of each step", () => {
    const axis = axisOf([10, 20, 30]);
    for (let step = 10; step < 30; step += 1) expect(stepAt(axis, shareOf(axis, step) + 1e-9)).toBe(step);
    expect([stepAt(axis, -1), stepAt(axis, 2)]).toEqual([10, 29]);
    expect([shareOf(axis, 10), shareOf(axis, 30)]).toEqual([0, 1]);
  });

  it("has one step without columns", () => {
    expect(axisOf([])).toEqual({ first: 0, end: 1 });
    expect(axisOf([7])).toEqual({ first: 7, end: 8 });
  });

  it("finds the column of a step", () => {
    const edges = [0, 3, 4, 9];
    expect([-1, 0, 2, 3, 4, 8, 9].map((step) => columnOf(edges, step))).toEqual([null, 0, 0, 1, 2, 2, null]);
    expect(columnOf([], 0)).toBeNull();
    expect(middles(edges)).toEqual([1, 3, 6]);
    expect([0, 1, 5].map((column) => nameOfColumn(edges, column))).toEqual(["steps 0–2", "step 3", ""]);
  });

  it("places times at the step that was recorded last", () => {
    const grid = { edges: [0, 1, 2, 3], time_ns: [10, null, 30] };
    expect([5, 10, 29, 30, 99].map((time) => stepAtTime(grid, time))).toEqual([null, 0, 0, 2, 2]);
  });
});
