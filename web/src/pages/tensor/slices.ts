// Two dimensions of a saved tensor as a table, and the ranges of bytes that a window of the table needs.

/** Which dimensions are the rows and columns of the table, and the index in each other dimension. */
export interface SliceChoice {
  rows: number;
  columns: number;
  /** Index per dimension; those of `rows` and `columns` are not used. */
  fixed: readonly number[];
}

/** A tensor, or a slice of it, as a table. */
export interface SliceTable {
  rows: number;
  columns: number;
  /** Place of an element in row-major order; null where a wrapped last row has no element. */
  place(row: number, column: number): number | null;
}

/** A part of a table. */
export interface TableWindow {
  top: number;
  left: number;
  rows: number;
  columns: number;
}

/** Elements of one range of bytes: from `first` to `end`, exclusive. */
export interface ElementRange {
  first: number;
  end: number;
}

const WRAP = 64;
export const WINDOW = 128;
const MOST_RANGES = 32;
const MOST_BYTES = 8 * 1024 * 1024;
const GAPS = [4 * 1024, 64 * 1024, 512 * 1024];

/** Return the choice in a text such as `2,r,c,0`; the last two dimensions for anything else. */
export function parseSlice(text: string, shape: readonly number[]): SliceChoice {
  const words = text.split(",");
  const usual = { rows: shape.length - 2, columns: shape.length - 1, fixed: shape.map(() => 0) };
  if (shape.length < 2 || words.length !== shape.length) return usual;
  const [rows, columns] = [words.indexOf("r"), words.indexOf("c")];
  const fixed = words.map((word, dimension) => Math.min(shape[dimension]! - 1, Number(word) || 0));
  if (rows < 0 || columns < 0 || fixed.some((index) => !Number.isInteger(index) || index < 0)) return usual;
  return { rows, columns, fixed };
}

/** Return the text of a choice, for the address. */
export function formatSlice(choice: SliceChoice): string {
  return choice.fixed
    .map((index, dimension) => (dimension === choice.rows ? "r" : dimension === choice.columns ? "c" : index))
    .join(",");
}

/** Return the choice after a dimension became the rows or columns; the dimension that it replaces takes its place. */
export function withDimension(choice: SliceChoice, end: "rows" | "columns", dimension: number): SliceChoice {
  const other = end === "rows" ? "columns" : "rows";
  return choice[other] === dimension
    ? { ...choice, [end]: dimension, [other]: choice[end] }
    : { ...choice, [end]: dimension };
}

/** Return the table of a slice. A vector is wrapped into rows, a scalar is one cell. */
export function tableOf(shape: readonly number[], choice: SliceChoice): SliceTable {
  const size = shape.reduce((product, length) => product * length, 1);
  if (shape.length < 2) {
    const columns = Math.min(WRAP, size);
    const rows = columns === 0 ? 0 : Math.ceil(size / columns);
    return {
      rows,
      columns,
      place: (row, column) => (row * columns + column < size ? row * columns + column : null),
    };
  }
  const strides = shape.map((_, dimension) =>
    shape.slice(dimension + 1).reduce((product, length) => product * length, 1),
  );
  let base = 0;
  choice.fixed.forEach((index, dimension) => {
    if (dimension !== choice.rows && dimension !== choice.columns) base += index * strides[dimension]!;
  });
  const [byRow, byColumn] = [strides[choice.rows]!, strides[choice.columns]!];
  const empty = size === 0;
  return {
    rows: empty ? 0 : shape[choice.rows]!,
    columns: empty ? 0 : shape[choice.columns]!,
    place: (row, column) => base + row * byRow + column * byColumn,
  };
}

/** Return a window of the table with this first cell, moved into the table. */
export function windowAt(table: SliceTable, top: number, left: number, most = WINDOW): TableWindow {
  const [rows, columns] = [Math.min(most, table.rows), Math.min(most, table.columns)];
  const limit = (value: number, length: number): number => Math.max(0, Math.min(Math.floor(value), length));
  return { top: limit(top, table.rows - rows), left: limit(left, table.columns - columns), rows, columns };
}

/** The reads that a window needs, with the window, which is smaller than wanted if its elements are far apart. */
export interface ReadPlan {
  window: TableWindow;
  ranges: ElementRange[];
}

/** Return the ranges of elements to read for a window: few, and of bounded size, whatever the order of the dimensions. */
export function planReads(table: SliceTable, wanted: TableWindow, elementBytes: number): ReadPlan {
  let window = wanted;
  for (;;) {
    const places = placesOf(table, window);
    let ranges: ElementRange[] = [];
    for (const gap of GAPS) {
      ranges = join(places, Math.max(1, gap / elementBytes));
      if (ranges.length <= MOST_RANGES) break;
    }
    const bytes = ranges.reduce((sum, range) => sum + (range.end - range.first) * elementBytes, 0);
    const fits = ranges.length <= MOST_RANGES && bytes <= MOST_BYTES;
    if (fits || (window.rows <= 1 && window.columns <= 1)) return { window, ranges };
    const [down, right] = [distance(table, window, "rows"), distance(table, window, "columns")];
    window =
      (down >= right && window.rows > 1) || window.columns <= 1
        ? { ...window, rows: Math.ceil(window.rows / 2) }
        : { ...window, columns: Math.ceil(window.columns / 2) };
  }
}

function placesOf(table: SliceTable, window: TableWindow): Float64Array {
  const places: number[] = [];
  for (let row = 0; row < window.rows; row += 1)
    for (let column = 0; column < window.columns; column += 1) {
      const place = table.place(window.top + row, window.left + column);
      if (place !== null) places.push(place);
    }
  return Float64Array.from(places).sort();
}

function join(places: Float64Array, gap: number): ElementRange[] {
  const ranges: ElementRange[] = [];
  for (const place of places) {
    const last = ranges.at(-1);
    if (last !== undefined && place - last.end <= gap) last.end = place + 1;
    else ranges.push({ first: place, end: place + 1 });
  }
  return ranges;
}

function distance(table: SliceTable, window: TableWindow, along: "rows" | "columns"): number {
  const first = table.place(window.top, window.left) ?? 0;
  const next =
    along === "rows" ? table.place(window.top + 1, window.left) : table.place(window.top, window.left + 1);
  return next === null ? 0 : Math.abs(next - first);
}

/** Return the values of a window, row by row, from the elements of its ranges; null where there is no element. */
export function valuesOf(
  table: SliceTable,
  plan: ReadPlan,
  parts: readonly ArrayLike<number>[],
): (number | null)[] {
  const { window, ranges } = plan;
  const values: (number | null)[] = [];
  for (let row = 0; row < window.rows; row += 1)
    for (let column = 0; column < window.columns; column += 1) {
      const place = table.place(window.top + row, window.left + column);
      if (place === null) {
        values.push(null);
        continue;
      }
      let [low, high] = [0, ranges.length - 1];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (ranges[middle]!.first <= place) low = middle;
        else high = middle - 1;
      }
      values.push(parts[low]?.[place - (ranges[low]?.first ?? 0)] ?? null);
    }
  return values;
}
