import { viridis, type ColourScale } from "./scale";

/** Cells of a heatmap, row by row: `values[row * columns + column]`; null or NaN where nothing was recorded. */
export interface HeatmapCells {
  rows: number;
  columns: number;
  values: ArrayLike<number | null>;
  /** Number of values that are not finite, per cell; such cells are drawn in the colour of faults. */
  nonfinite?: ArrayLike<number>;
}

/** Draw cells into pixels, one pixel per cell: RGBA, row by row. Cells without a value stay transparent. */
export function cellPixels(
  cells: HeatmapCells,
  scale: ColourScale,
  fault: readonly [number, number, number],
): Uint8ClampedArray<ArrayBuffer> {
  const pixels = new Uint8ClampedArray(cells.rows * cells.columns * 4);
  const palette = Array.from({ length: 256 }, (_, index) => viridis(index / 255));
  for (let index = 0; index < cells.rows * cells.columns; index += 1) {
    let shade: readonly [number, number, number] | undefined;
    if (cells.nonfinite !== undefined && (cells.nonfinite[index] ?? 0) > 0) shade = fault;
    else {
      const position = scale.position(cells.values[index] ?? null);
      if (position !== null) shade = palette[Math.round(position * 255)];
      else if (cells.values[index] === 0) shade = palette[0]; // zero on a logarithmic scale
    }
    if (shade === undefined) continue;
    pixels.set(shade, index * 4);
    pixels[index * 4 + 3] = 255;
  }
  return pixels;
}

/** Move the selected cell by a key; null if the key is not one that moves. */
export function moveCell(
  key: string,
  cell: { row: number; column: number },
  size: { rows: number; columns: number },
): { row: number; column: number } | null {
  const steps: Record<string, [number, number]> = {
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    PageUp: [-10, 0],
    PageDown: [10, 0],
    Home: [0, -Infinity],
    End: [0, Infinity],
  };
  const step = steps[key];
  if (step === undefined) return null;
  const limit = (value: number, length: number): number => Math.min(length - 1, Math.max(0, value));
  return { row: limit(cell.row + step[0], size.rows), column: limit(cell.column + step[1], size.columns) };
}
