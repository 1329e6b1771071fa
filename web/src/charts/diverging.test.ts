import { expect, it } from "vitest";
import { diverging, isDark } from "./diverging";

it("has different hues for the signs, and fades towards zero", () => {
  for (const dark of [false, true]) {
    const [below, , above] = [diverging(-1, dark), diverging(0, dark), diverging(1, dark)];
    expect(below[2]).toBeGreaterThan(below[0]); // blue
    expect(above[0]).toBeGreaterThan(above[2]); // orange
    expect(diverging(-5, dark)).toEqual(below);
    expect(isDark(`rgb(${diverging(0, dark).join(", ")})`)).toBe(dark);
  }
});
