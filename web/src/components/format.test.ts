import { describe, expect, it } from "vitest";
import { formatAge, formatBytes, formatDuration, formatNumber, formatShare } from "./format";
import { exceedsBudget, overheadText } from "./states";

describe("format", () => {
  it("writes integers exactly, other numbers with four digits, and those that are not finite as what they are", () => {
    expect([0, 49152, -1234567, 98304].map(formatNumber)).toEqual(["0", "49,152", "−1,234,567", "98,304"]);
    expect([0.012345, -1.23456e-9, 123456.7, 12.5, null, NaN, Infinity, -Infinity].map(formatNumber)).toEqual(
      ["0.01235", "−1.235e−9", "1.235e5", "12.5", "–", "–", "∞", "−∞"],
    );
  });

  it("writes the cost of recording in words, and colours it only beyond the budget after the first steps", () => {
    const overhead = { share: 0.018, recent_share: 0.009, budget: 0.01, steps: 900 };
    expect(overheadText(overhead)).toBe("1.8 % of the program's time, 0.9 % in the last minutes, budget 1 %");
    expect(overheadText({ ...overhead, recent_share: null, budget: null })).toBe(
      "1.8 % of the program's time",
    );
    const over = { ...overhead, recent_share: 0.02 };
    expect(
      [overhead, over, { ...over, steps: 200 }, { ...over, budget: null }, null].map(exceedsBudget),
    ).toEqual([false, true, false, false, false]);
    expect(exceedsBudget({ ...overhead, recent_share: null })).toBe(true);
  });

  it("writes durations, ages, sizes and shares with one or two units", () => {
    expect([5e8, 1.25e10, 1.85e11, 7.8e12, 2.7e14].map(formatDuration)).toEqual([
      "500 ms",
      "13 s",
      "3 min 5 s",
      "2 h 10 min",
      "3 d 3 h",
    ]);
    expect(formatAge(0, 0)).toBe("now");
    expect(formatAge(0, 60_000)).toBe("1 min 0 s ago");
    expect([0, 1023, 1536, 5 * 1024 ** 3].map(formatBytes)).toEqual(["0 B", "1020 B", "1.5 KiB", "5 GiB"]);
    expect(formatShare(0.0123)).toBe("1.23 %");
  });
});
