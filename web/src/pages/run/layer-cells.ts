import type { Schemas } from "../../api/client";

// The matrix of the picture of the layers, as the service sends it, and as it is drawn.

type Description = Omit<Schemas["HeatmapOutput"], "edges" | "mean" | "min" | "max" | "nonfinite">;

export interface LayerMatrix extends Description {
  /** First step of each column, and the end of the last. */
  edges: number[];
  /** One value per cell, row by row; NaN where nothing finite was recorded. */
  values: Float32Array;
  /** Number of NaN and infinite elements per cell. */
  nonfinite: Uint32Array;
}

const LARGEST_HEADER = 16 * 1024 * 1024;

/**
 * Read the service's answer: a safetensors file with `edges`, `nonfinite` and one matrix, and the rest as JSON in its metadata.
 *
 * Throws an Error if it is not one.
 */
export function readMatrix(bytes: ArrayBuffer, reduction: string): LayerMatrix {
  if (bytes.byteLength < 8) throw new Error("The answer is too short.");
  const length = Number(new DataView(bytes).getBigUint64(0, true));
  if (length > Math.min(LARGEST_HEADER, bytes.byteLength - 8))
    throw new Error("The answer has no valid header.");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length))) as Record<
    string,
    { data_offsets: [number, number] }
  > & { __metadata__: { description: string } };
  const part = (name: string): ArrayBuffer => {
    const entry = header[name];
    if (entry === undefined) throw new Error(`The answer has no ${name}.`);
    const [from, to] = entry.data_offsets;
    return bytes.slice(8 + length + from, 8 + length + to);
  };
  return {
    ...(JSON.parse(header.__metadata__.description) as Description),
    edges: Array.from(new BigInt64Array(part("edges")), Number),
    values: new Float32Array(part(reduction)),
    nonfinite: new Uint32Array(part("nonfinite")),
  };
}

/** Cells with the gaps between measurements filled. */
export interface FilledCells {
  values: Float32Array;
  nonfinite: Uint32Array;
  /** Column whose measurement a cell shows; -1 if it shows none. */
  source: Int32Array;
}

const MOST_INTERVALS = 3;

/**
 * Repeat each measurement until the next one of its row, because tensors are not measured at every step. A row that is not measured
 * for more than three of its usual intervals stays empty, so that the end of a series is visible.
 */
export function fillGaps(
  matrix: Pick<LayerMatrix, "values" | "nonfinite">,
  rows: number,
  columns: number,
): FilledCells {
  const values = Float32Array.from(matrix.values);
  const nonfinite = Uint32Array.from(matrix.nonfinite);
  const source = new Int32Array(rows * columns).fill(-1);
  for (let row = 0; row < rows; row += 1) {
    const measured: number[] = [];
    for (let column = 0; column < columns; column += 1) {
      const cell = row * columns + column;
      if (!Number.isNaN(matrix.values[cell]) || (matrix.nonfinite[cell] ?? 0) > 0) measured.push(column);
    }
    const intervals = measured.slice(1).map((column, place) => column - measured[place]!);
    intervals.sort((a, b) => a - b);
    const usual = intervals[Math.floor(intervals.length / 2)] ?? 1;
    measured.forEach((from, place) => {
      const until = Math.min(measured[place + 1] ?? columns, from + usual * MOST_INTERVALS);
      for (let column = from; column < until; column += 1) {
        source[row * columns + column] = from;
        values[row * columns + column] = matrix.values[row * columns + from]!;
        nonfinite[row * columns + column] = matrix.nonfinite[row * columns + from]!;
      }
    });
  }
  return { values, nonfinite, source };
}
