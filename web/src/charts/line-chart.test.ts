import { expect, it } from "vitest";
import { alone, formatTick, logTicks, placedOn, positiveOnly, smooth, stepsWithGaps } from "./line-chart";

it("smooths without a pull to zero, and leaves gaps", () => {
  expect(smooth([4, 4, null, 4], 0.9).map((value) => value && Number(value.toFixed(9)))).toEqual([
    4,
    4,
    null,
    4,
  ]);
  expect(smooth([1, 3], 0)).toEqual([1, 3]);
  const [first, second] = smooth([0, 1], 0.5);
  expect(first).toBe(0);
  expect(second).toBeCloseTo(2 / 3);
});

it("leaves a gap between measurements, and none within or between joined steps", () => {
  const seldom = { step: [0, 50, 51], last_step: [0, 50, 51] };
  const often = { step: [49, 50, 52], last_step: [49, 50, 52] };
  const x = stepsWithGaps([seldom, often]);
  expect(x).toEqual([0, 1, 49, 50, 51, 52]);
  expect(placedOn(x, seldom, [0, 1000, 1000])).toEqual([0, null, null, 1000, 1000, null]);
  expect(placedOn(x, often, [1, 2, 3])).toEqual([null, null, 1, 2, null, 3]);
  const joined = { step: [0, 12, 40], last_step: [9, 19, 49] };
  expect(stepsWithGaps([joined])).toEqual([0, 12, 20, 40]);
  expect(placedOn([0, 5, 12, 20, 40], joined, [1, null, 3])).toEqual([1, undefined, null, null, 3]);
});

it("shows values without a neighbour as points", () => {
  expect(alone([1, null, 2, 3, undefined, 4, null, 5, undefined])).toEqual([0, 7]);
  expect(alone([])).toEqual([]);
});

it("shows only positive values on a logarithmic axis", () => {
  expect(positiveOnly([1, 0, -1, null])).toEqual([1, null, null, null]);
});

it("has few ticks on a logarithmic axis, whatever its range", () => {
  expect(logTicks(1, 100)).toEqual([1, 2, 5, 10, 20, 50, 100]);
  expect(logTicks(1e-3, 1e3)).toEqual([0.001, 0.01, 0.1, 1, 10, 100, 1000]);
  expect(logTicks(1e-30, 1e30).length).toBeLessThanOrEqual(8);
  expect(logTicks(0, 1)).toEqual([]);
  expect([1e5, 1.5e-7, 0.2].map(formatTick)).toEqual(["1e5", "1.5e−7", "0.2"]);
});
