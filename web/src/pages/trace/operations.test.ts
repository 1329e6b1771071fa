import { describe, expect, it } from "vitest";
import { matchesOf, nextBad, nextMatch, operationsOf, placeOf, windowOf, type Filter } from "./operations";

const operations = operationsOf({
  index: [0, 1, 2, 5, 6, 7],
  step: [3, 3, 3, 4, 4, 4],
  name: [0, 1, 0, 1, 2, -1],
  node: [0, 0, 1, 0, 0, 0],
  module: [0, 1, 2, 0, 3, 0],
  phase: [0, 0, 1, 0, 0, 1],
  bad: [2, 4],
  names: ["aten.mm", "aten.log", "aten.softmax"],
  nodes: ["", "LogBackward0"],
  modules: ["", "head", "head.linear", "header"],
  phases: ["forward", "backward"],
});
const none: Filter = { text: "", module: "", phase: "", step: null, badOnly: false };
const selected = (filter: Partial<Filter>): number[] => {
  const { mask, count } = matchesOf(operations, { ...none, ...filter });
  const places = [...operations.index.keys()].filter((place) => mask === null || mask[place] === 1);
  expect(count).toBe(places.length);
  return places;
};

describe("operations", () => {
  it("finds places, steps and bad operations", () => {
    expect([0, 5, 7, 3, 8].map((index) => placeOf(operations, index))).toEqual([0, 3, 5, null, null]);
    expect(operations.boundaries).toEqual([0, 3]);
    expect([...operations.bad]).toEqual([0, 0, 1, 0, 1, 0]);
  });

  it("selects by text, module, phase, step and health", () => {
    expect(matchesOf(operations, none).mask).toBeNull();
    expect(selected({ text: "LOG" })).toEqual([1, 2, 3]); // names, and nodes
    expect(selected({ module: "head" })).toEqual([1, 2]); // not `header`
    expect(selected({ phase: "backward" })).toEqual([2, 5]);
    expect(selected({ step: 4, badOnly: true })).toEqual([4]);
    expect(selected({ text: "nothing" })).toEqual([]);
  });

  it("moves between selected and between bad operations", () => {
    const matches = matchesOf(operations, { ...none, text: "log" });
    expect(nextMatch(operations, matches, -1, 1)).toBe(1);
    expect(nextMatch(operations, matches, 3, 1)).toBeNull();
    expect(nextMatch(operations, matches, 3, -1)).toBe(2);
    expect([-1, 2, 3, 4].map((place) => nextBad(operations, place, 1))).toEqual([2, 4, 4, null]);
    expect([6, 4, 3, 2].map((place) => nextBad(operations, place, -1))).toEqual([4, 2, 2, null]);
  });

  it("shows a window around a place", () => {
    const all = matchesOf(operations, none);
    expect(windowOf(operations, all, 3, 2)).toEqual({ places: [2, 3], before: 2, after: 2 });
    expect(windowOf(operations, all, 0, 4)).toEqual({ places: [0, 1, 2, 3], before: 0, after: 2 });
    expect(windowOf(operations, all, 5, 10)).toEqual({ places: [0, 1, 2, 3, 4, 5], before: 0, after: 0 });
    const logs = matchesOf(operations, { ...none, text: "log" });
    expect(windowOf(operations, logs, 5, 2)).toEqual({ places: [2, 3], before: 1, after: 0 });
    expect(windowOf(operations, logs, 0, 2)).toEqual({ places: [1, 2], before: 0, after: 1 });
  });
});
