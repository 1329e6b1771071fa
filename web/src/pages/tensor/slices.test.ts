import { describe, expect, it } from "vitest";
import { unravel } from "./elements";
import {
  formatSlice,
  parseSlice,
  planReads,
  tableOf,
  valuesOf,
  windowAt,
  withDimension,
  type SliceChoice,
} from "./slices";

/** Read a window of a tensor whose elements are their own places. */
function read(shape: number[], choice: SliceChoice, top = 0, left = 0, bytes = 4) {
  const table = tableOf(shape, choice);
  const plan = planReads(table, windowAt(table, top, left), bytes);
  const parts = plan.ranges.map(({ first, end }) => Array.from({ length: end - first }, (_, i) => first + i));
  return { table, plan, values: valuesOf(table, plan, parts) };
}

describe("slices", () => {
  it("keeps a choice in the address, and falls back to the last two dimensions", () => {
    const shape = [2, 3, 4, 5];
    expect(parseSlice("", shape)).toEqual({ rows: 2, columns: 3, fixed: [0, 0, 0, 0] });
    const choice = parseSlice("c,2,r,4", shape);
    expect(choice).toEqual({ rows: 2, columns: 0, fixed: [0, 2, 0, 4] });
    expect(parseSlice(formatSlice(choice), shape)).toEqual(choice);
    for (const text of ["r,c", "r,r,c,0", "0,1,2,3", "r,c,-1,0", "r,c,x,99"])
      expect(parseSlice(text, shape).fixed.every((index, d) => index >= 0 && index < shape[d]!)).toBe(true);
    expect(parseSlice("r,c", [7])).toEqual({ rows: -1, columns: 0, fixed: [0] });
  });

  it("exchanges dimensions", () => {
    const choice = parseSlice("0,r,c", [2, 3, 4]);
    expect(withDimension(choice, "rows", 0)).toMatchObject({ rows: 0, columns: 2 });
    expect(withDimension(choice, "rows", 2)).toMatchObject({ rows: 2, columns: 1 });
  });

  it("shows the elements of the chosen dimensions, in every order", () => {
    const shape = [3, 4, 5];
    for (const text of ["1,r,c", "1,c,r", "r,2,c", "c,2,r", "r,c,3", "c,r,3"]) {
      const choice = parseSlice(text, shape);
      const { plan, values } = read(shape, choice);
      values.forEach((value, cell) => {
        const index = unravel(value!, shape);
        expect(index[choice.rows]).toBe(Math.floor(cell / plan.window.columns));
        expect(index[choice.columns]).toBe(cell % plan.window.columns);
        shape.forEach((_, d) => {
          if (d !== choice.rows && d !== choice.columns) expect(index[d]).toBe(choice.fixed[d]);
        });
      });
    }
  });

  it("wraps vectors, and shows scalars and empty tensors", () => {
    const vector = read([70], parseSlice("", [70]));
    expect([vector.table.rows, vector.table.columns]).toEqual([2, 64]);
    expect(vector.values[69]).toBe(69);
    expect(vector.values[70]).toBeNull();
    expect(read([], parseSlice("", [])).values).toEqual([0]);
    expect(read([0, 4], parseSlice("", [0, 4])).values).toEqual([]);
    expect(read([0], parseSlice("", [0])).values).toEqual([]);
  });

  it("reads little of a large tensor, whichever way it is cut", () => {
    const shape = [512, 4096, 4096];
    for (const text of ["7,r,c", "7,c,r", "r,7,c", "c,7,r", "r,c,7", "c,r,7"]) {
      const choice = parseSlice(text, shape);
      const { plan, table } = read(shape, choice, 300, 2000);
      const bytes = plan.ranges.reduce((sum, range) => sum + (range.end - range.first) * 4, 0);
      expect(plan.ranges.length).toBeLessThanOrEqual(32);
      expect(bytes).toBeLessThanOrEqual(8 * 1024 * 1024);
      expect(plan.window.rows * plan.window.columns).toBeGreaterThanOrEqual(32);
      expect(plan.window.top).toBeLessThanOrEqual(table.rows - plan.window.rows);
    }
  });

  it("moves windows into the table", () => {
    const table = tableOf([300, 10], parseSlice("", [300, 10]));
    expect(windowAt(table, 999, 5)).toEqual({ top: 172, left: 0, rows: 128, columns: 10 });
    expect(windowAt(table, -5, 0).top).toBe(0);
  });
});
