import { expect, it } from "vitest";
import { formatTick, logTicks, positiveOnly, smooth } from "./line-chart";

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
