import { describe, expect, it } from "vitest";
import { packed, paintBad, paintCells, placeAt, type CellInput, type Pixels } from "./paint";

const COUNT = 8;
const input = (mask: Uint8Array | null = null): CellInput => ({
  rows: Int16Array.of(0, 1, 0, 1, 0, 1, 0, 1),
  phase: Int16Array.of(0, 0, 0, 0, 1, 1, 1, 1),
  bad: Uint8Array.of(0, 0, 0, 0, 0, 1, 0, 0),
  mask,
  colours: Uint32Array.of(11, 22),
  badColour: 99,
  dimColour: 5,
});
const picture = (width: number): Pixels => ({ data: new Uint32Array(width * 2), width, height: 2 });
const rowsOf = ({ data, width }: Pixels): number[][] => [[...data.slice(0, width)], [...data.slice(width)]];

describe("cells", () => {
  it("are drawn in their rows and colours", () => {
    const pixels = picture(8);
    paintCells(pixels, [0, COUNT], input());
    expect(rowsOf(pixels)).toEqual([
      [11, 0, 11, 0, 22, 0, 22, 0],
      [0, 11, 0, 11, 0, 22, 0, 22],
    ]);
  });

  it("are as wide as the zoom makes them, and cut at the edges", () => {
    const pixels = picture(8);
    paintCells(pixels, [3.5, 5.5], input());
    expect(rowsOf(pixels)).toEqual([
      [0, 0, 22, 22, 22, 22, 0, 0],
      [11, 11, 0, 0, 0, 0, 22, 22],
    ]);
  });

  it("share pixels when there are more of them", () => {
    const pixels = picture(2);
    paintCells(pixels, [0, COUNT], input(Uint8Array.of(0, 0, 0, 0, 1, 0, 0, 0)));
    expect(rowsOf(pixels)).toEqual([
      [5, 22],
      [5, 5],
    ]);
  });

  it("that are bad have a least width", () => {
    const pixels = picture(8);
    paintBad(pixels, [0, COUNT], input());
    expect(rowsOf(pixels)).toEqual([
      [0, 0, 0, 0, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 99, 99, 99],
    ]);
    paintBad(pixels, [0, COUNT], input(new Uint8Array(COUNT)));
    expect(Math.max(...pixels.data)).toBe(0);
  });
});

describe("the operation at a pixel", () => {
  it("is the one there, or near it in the row", () => {
    const cells = input();
    expect(placeAt(25, 0, 80, [0, COUNT], cells)).toBe(2);
    expect(placeAt(29, 1, 80, [0, COUNT], cells)).toBe(1);
    expect(placeAt(25, 7, 80, [0, COUNT], cells)).toBeNull();
  });

  it("is a bad one before others of the same pixels", () => {
    expect(placeAt(1, 1, 2, [0, COUNT], input())).toBe(5);
  });
});

it("packs colours in the order of bytes", () => {
  expect([...new Uint8Array(Uint32Array.of(packed("rgb(1, 2, 3)")).buffer)]).toEqual([1, 2, 3, 255]);
});
