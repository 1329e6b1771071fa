import { describe, expect, it } from "vitest";
import { bytesOf, decode, unravel } from "./elements";

const bytes = (...values: number[]): ArrayBuffer => Uint8Array.from(values).buffer;
const words = (...values: number[]): ArrayBuffer => Uint16Array.from(values).buffer;

describe("elements of saved tensors", () => {
  it("reads every float format exactly", () => {
    expect([...Array.from(decode("F32", Float32Array.from([1.5, -Infinity, NaN]).buffer))]).toEqual([
      1.5,
      -Infinity,
      NaN,
    ]);
    // 1, −2, largest, smallest subnormal, infinity, NaN
    expect(Array.from(decode("F16", words(0x3c00, 0xc000, 0x7bff, 1, 0x7c00, 0x7e00)))).toEqual([
      1,
      -2,
      65504,
      2 ** -24,
      Infinity,
      NaN,
    ]);
    expect(Array.from(decode("BF16", words(0x3f80, 0xc000, 0x7f80, 0x7fc0)))).toEqual([1, -2, Infinity, NaN]);
    expect(Array.from(decode("F8_E4M3", bytes(0x38, 0x7e, 0x01, 0x7f, 0xb8)))).toEqual([
      1,
      448,
      2 ** -9,
      NaN,
      -1,
    ]);
    expect(Array.from(decode("F8_E5M2", bytes(0x3c, 0x7b, 0x01, 0x7c)))).toEqual([
      1,
      57344,
      2 ** -16,
      Infinity,
    ]);
    expect(Array.from(decode("F8_E8M0", bytes(127, 130, 255)))).toEqual([1, 8, NaN]);
  });

  it("reads integers and complex numbers", () => {
    expect(Array.from(decode("I64", BigInt64Array.from([-3n, 2n ** 40n]).buffer))).toEqual([-3, 2 ** 40]);
    expect(Array.from(decode("BOOL", bytes(0, 1)))).toEqual([0, 1]);
    expect(Array.from(decode("C64", Float32Array.from([3, 4, 0, -2]).buffer))).toEqual([5, 2]);
    expect(bytesOf("F4")).toBeNull();
    expect(() => decode("F4", bytes(0))).toThrow("F4");
  });

  it("names elements by their index", () => {
    expect(unravel(0, [])).toEqual([]);
    expect(unravel(23, [2, 3, 4])).toEqual([1, 2, 3]);
    expect(unravel(5, [10])).toEqual([5]);
  });
});
