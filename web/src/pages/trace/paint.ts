// Cells of the timeline as pixels: one row of pixels per row, one column per pixel of the picture's width. Whatever the number of
// operations, a picture takes one pass over those that it shows.

/** What a picture of operations needs. Colours are RGBA in the order of bytes in memory, as `packed` returns them. */
export interface CellInput {
  /** Row of each operation. */
  rows: Int16Array;
  /** Number that selects each operation's colour in `colours`. */
  phase: Int16Array;
  bad: Uint8Array;
  /** 1 for each operation that the filter selects; null: all. */
  mask: Uint8Array | null;
  colours: Uint32Array;
  badColour: number;
  /** Colour of operations that the filter does not select. */
  dimColour: number;
}

/** Part of the operations: from a place up to another one; both may have fractions. */
export type PlaceRange = readonly [number, number];

/** Pixels of a picture: `height` rows of `width` pixels. */
export interface Pixels {
  data: Uint32Array;
  width: number;
  height: number;
}

/** Least width of a bad operation, in pixels. */
const BAD_WIDTH = 3;

/** Draw the operations of a range. What the filter selects is over what it does not. */
export function paintCells(pixels: Pixels, range: PlaceRange, input: CellInput): void {
  pixels.data.fill(0);
  if (input.mask !== null) paintPass(pixels, range, input, 0);
  paintPass(pixels, range, input, 1);
}

/** Draw the bad operations of a range that the filter selects, each at least some pixels wide. */
export function paintBad(pixels: Pixels, range: PlaceRange, input: CellInput): void {
  pixels.data.fill(0);
  const { bad, mask, badColour } = input;
  const [first, end] = placesIn(range, input.rows.length);
  for (let place = first; place < end; place += 1)
    if (bad[place] === 1 && (mask === null || mask[place] === 1))
      fillCell(pixels, range, input.rows[place]!, place, badColour, BAD_WIDTH);
}

function paintPass(pixels: Pixels, range: PlaceRange, input: CellInput, selected: 0 | 1): void {
  const { data, width, height } = pixels;
  const { rows, phase, mask, colours, dimColour } = input;
  const from = range[0];
  const scale = width / (range[1] - from);
  const [first, end] = placesIn(range, rows.length);
  for (let place = first; place < end; place += 1) {
    if ((mask === null ? 1 : mask[place]!) !== selected) continue;
    const colour = selected === 1 ? colours[phase[place]!]! : dimColour;
    const row = rows[place]!;
    if (scale >= 2) fillCell(pixels, range, row, place, colour, 1);
    else {
      // Narrow operations are one pixel, which is set without a call.
      const column = Math.floor((place - from) * scale);
      if (row < height && column >= 0 && column < width) data[row * width + column] = colour;
    }
  }
}

function fillCell(
  { data, width, height }: Pixels,
  [from, to]: PlaceRange,
  row: number,
  place: number,
  colour: number,
  least: number,
): void {
  if (row >= height) return;
  const scale = width / (to - from);
  const begin = Math.floor((place - from) * scale);
  const end = Math.max(begin + least, Math.floor((place + 1 - from) * scale));
  if (end > 0 && begin < width)
    data.fill(colour, row * width + Math.max(0, begin), row * width + Math.min(width, end));
}

function placesIn([from, to]: PlaceRange, count: number): [number, number] {
  return [Math.max(0, Math.floor(from)), Math.min(count, Math.ceil(to))];
}

/** Return a colour such as `rgb(20, 24, 29)` as one number for `paintCells`. */
export function packed(rgb: string, alpha = 255): number {
  const [red = 0, green = 0, blue = 0] = (rgb.match(/[\d.]+/g) ?? []).map(Number);
  const bytes = new Uint8Array([red, green, blue, alpha]);
  return new Uint32Array(bytes.buffer)[0]!;
}

/** Return the operation that a pixel shows: the place at x, or near it in the row; bad ones first. Null if the row has none there. */
export function placeAt(
  x: number,
  row: number,
  width: number,
  range: PlaceRange,
  input: Pick<CellInput, "rows" | "bad" | "mask">,
): number | null {
  const perPixel = (range[1] - range[0]) / width;
  const exact = Math.floor(range[0] + x * perPixel);
  const around = Math.max(1, Math.ceil(4 * perPixel));
  const first = Math.max(0, exact - around);
  const end = Math.min(input.rows.length, exact + around + 1);
  let best: number | null = null;
  let bestScore = Infinity;
  for (let place = first; place < end; place += 1) {
    if (input.rows[place] !== row) continue;
    const selected = input.mask === null || input.mask[place] === 1;
    const distance = Math.abs(place - exact) / perPixel; // in pixels
    const score = distance + (selected ? 0 : 100) - (input.bad[place] === 1 ? 3 : 0);
    if (score < bestScore) [best, bestScore] = [place, score];
  }
  return best;
}
