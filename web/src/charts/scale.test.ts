import { describe, expect, it } from "vitest";
import { colourScale, viridis } from "./scale";

describe("colour scales", () => {
  it("places the least at 0, the largest at 1, and nothing that is not a number", () => {
    const scale = colourScale([3, null, 1, NaN, 2, Infinity], false);
    expect([scale.low, scale.high]).toEqual([1, 3]);
    expect([1, 2, 3, 9, null, NaN].map((value) => scale.position(value))).toEqual([0, 0.5, 1, 1, null, null]);
  });

  it("has no place for zero on a logarithmic scale, and spans few decades", () => {
    const scale = colourScale([0, 1e-30, 1, 100], true);
    expect(scale.position(0)).toBeNull();
    expect(scale.low).toBeCloseTo(1e-10);
    expect(scale.position(1e-30)).toBe(0);
    expect(scale.position(100)).toBe(1);
  });

  it("is defined without any value", () => {
    expect(colourScale([], true).position(3)).toBeGreaterThanOrEqual(0);
    expect(colourScale([5], false).position(5)).toBe(0.5);
  });

  it("runs from dark to bright", () => {
    const brightness = [0, 0.25, 0.5, 0.75, 1].map((at) => viridis(at).reduce((sum, part) => sum + part, 0));
    expect([...brightness].sort((a, b) => a - b)).toEqual(brightness);
    expect(viridis(-1)).toEqual(viridis(0));
    expect(viridis(2)).toEqual(viridis(1));
  });
});
