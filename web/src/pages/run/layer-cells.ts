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
