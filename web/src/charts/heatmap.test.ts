import { expect, it } from "vitest";
import { cellPixels, moveCell } from "./heatmap";
import { colourScale, viridis } from "./scale";

it("draws one pixel per cell: values by the scale, faults in their colour, nothing where nothing is", () => {
  const cells = { rows: 2, columns: 2, values: [1, 3, null, 2], nonfinite: [0, 0, 0, 1] };
  const pixels = cellPixels(cells, colourScale([1, 3], false), [9, 8, 7]);
  expect([...pixels]).toEqual([...viridis(0), 255, ...viridis(1), 255, 0, 0, 0, 0, 9, 8, 7, 255]);
});

it("moves within the cells by keys", () => {
  const size = { rows: 3, columns: 4 };
  expect(moveCell("ArrowRight", { row: 0, column: 3 }, size)).toEqual({ row: 0, column: 3 });
  expect(moveCell("PageDown", { row: 0, column: 1 }, size)).toEqual({ row: 2, column: 1 });
  expect(moveCell("End", { row: 1, column: 1 }, size)).toEqual({ row: 1, column: 3 });
  expect(moveCell("x", { row: 1, column: 1 }, size)).toBeNull();
});
