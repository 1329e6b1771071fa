import { describe, expect, it } from "vitest";
import { readMatrix } from "./layer-cells";

function safetensors(parts: Record<string, ArrayBufferView>, description: object): ArrayBuffer {
  const header: Record<string, unknown> = { __metadata__: { description: JSON.stringify(description) } };
  let offset = 0;
  for (const [name, data] of Object.entries(parts)) {
    header[name] = { data_offsets: [offset, (offset += data.byteLength)] };
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (text.length % 8)) % 8);
  const bytes = new Uint8Array(8 + text.length + offset);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(new TextEncoder().encode(text), 8);
  let at = 8 + text.length;
  for (const data of Object.values(parts)) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return bytes.buffer;
}

describe("the matrix of layers", () => {
  it("is read from safetensors", () => {
    const bytes = safetensors(
      {
        edges: new BigInt64Array([0n, 5n, 9n]),
        max: new Float32Array([1, NaN]),
        nonfinite: new Uint32Array([0, 3]),
      },
      { figure: "l2", tensors: ["a"] },
    );
    const matrix = readMatrix(bytes, "max");
    expect(matrix.edges).toEqual([0, 5, 9]);
    expect([...matrix.values]).toEqual([1, NaN]);
    expect([...matrix.nonfinite]).toEqual([0, 3]);
    expect(matrix.figure).toBe("l2");
    expect(() => readMatrix(bytes, "mean")).toThrow("no mean");
  });

  it("refuses what is not such a file", () => {
    expect(() => readMatrix(new ArrayBuffer(4), "mean")).toThrow("too short");
    expect(() => readMatrix(new Uint8Array(32).fill(255).buffer, "mean")).toThrow("header");
  });
});
