import { describe, expect, it } from "vitest";
import { partsOf, TensorScan } from "./scan";

describe("a pass over a saved tensor", () => {
  it("counts every element once, however the tensor is cut", () => {
    const values = Array.from({ length: 1000 }, (_, i) => (i % 7 === 0 ? 0 : (i - 500) / 3));
    values[17] = NaN;
    values[900] = -Infinity;
    const whole = new TensorScan(-500 / 3, 499 / 3);
    whole.add(values);
    const cut = new TensorScan(-500 / 3, 499 / 3);
    for (let at = 0; at < values.length; at += 37) cut.add(values.slice(at, at + 37));
    expect(cut.worst()).toEqual(whole.worst());
    expect(cut.powers()).toEqual(whole.powers());
    expect(cut.linear()).toEqual(whole.linear());
    const counted = whole.powers().counts.reduce((sum, count) => sum + count, 0);
    expect(counted + whole.zeros + whole.nonfinite).toBe(1000);
    expect(whole.linear()!.counts.reduce((sum, count) => sum + count, 0)).toBe(998);
  });

  it("lists what is not finite first, then the largest magnitudes", () => {
    const scan = new TensorScan(null, null);
    scan.add([1, -9, NaN, 3]);
    scan.add([Infinity, 0, 4]);
    expect(scan.worst()).toEqual([
      { place: 2, value: NaN },
      { place: 4, value: Infinity },
      { place: 1, value: -9 },
      { place: 6, value: 4 },
      { place: 3, value: 3 },
      { place: 0, value: 1 },
    ]);
    expect(scan.linear()).toBeNull();
    expect(scan.worst().length).toBeLessThanOrEqual(20);
  });

  it("bins by powers of two, from the most negative to the largest", () => {
    const scan = new TensorScan(-3, 1);
    scan.add([-3, -1, 1, 0.5, 0.75]);
    expect(scan.powers()).toEqual({
      lower: [-4, -2, 0.5, 1],
      upper: [-2, -1, 1, 2],
      counts: [1, 1, 2, 1],
    });
  });

  it("has one bar if all values are equal, and none without elements", () => {
    const same = new TensorScan(2, 2);
    same.add([2, 2]);
    expect(same.linear()!.counts).toEqual([2]);
    expect(new TensorScan(null, null).powers().counts).toEqual([]);
  });

  it("reads by whole elements", () => {
    expect(partsOf(10, 4, 7)).toEqual([
      [0, 4],
      [4, 8],
      [8, 10],
    ]);
    expect(partsOf(0, 4)).toEqual([]);
  });
});
