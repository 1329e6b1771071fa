import { describe, expect, it } from "vitest";
import { including, limited, panned, rangeOf, zoomed } from "./place-range";

describe("ranges of operations", () => {
  it("stay within the operations", () => {
    expect(limited(-5, 20, 100)).toEqual([0, 20]);
    expect(limited(95, 20, 100)).toEqual([80, 100]);
    expect(limited(50, 1000, 100)).toEqual([0, 100]);
    expect(limited(50, 1, 100)).toEqual([50, 58]);
    expect(limited(0, 10, 3)).toEqual([0, 3]);
    expect(limited(0, 10, 0)).toEqual([0, 1]);
    expect(panned([10, 30], 100, 100)).toEqual([80, 100]);
  });

  it("zoom around a place", () => {
    const [from, to] = zoomed([0, 100], 2, 0.25, 100);
    expect([from, to]).toEqual([12.5, 62.5]);
    expect(zoomed([from, to], 0.5, 0.25, 100)).toEqual([0, 100]);
  });

  it("follow a place out of view", () => {
    expect(including([10, 60], 30, 100)).toEqual([10, 60]);
    expect(including([10, 60], 80, 100)).toEqual([50, 100]);
    expect(including([0, 50], 0, 100)).toEqual([0, 50]);
    expect(including([50, 100], 99, 100)).toEqual([50, 100]);
  });

  it("are read from the address", () => {
    expect(rangeOf(null, null, 100)).toEqual([0, 100]);
    expect(rangeOf(20, 50, 100)).toEqual([20, 50]);
    expect(rangeOf(20, null, 100)).toEqual([20, 100]);
    expect(rangeOf(500, 2, 100)).toEqual([92, 100]);
  });
});
