// The step axis that the loss chart, the lanes of rules and the picture of the layers share.

/** The shown steps, `first` to `end - 1`. A step is drawn as wide as its share of the axis. */
export interface StepAxis {
  readonly first: number;
  readonly end: number;
}

/** Return the axis of a grid whose column `i` covers the steps `edges[i]` to `edges[i + 1] - 1`; one empty step without columns. */
export function axisOf(edges: readonly number[]): StepAxis {
  const [first, end] = [edges[0], edges.at(-1)];
  return first === undefined || end === undefined || end <= first
    ? { first: first ?? 0, end: (first ?? 0) + 1 }
    : { first, end };
}

/** Return where a step begins, as a share of the axis: 0 is its left end, 1 its right end; steps that are not shown are outside. */
export function shareOf(axis: StepAxis, step: number): number {
  return (step - axis.first) / (axis.end - axis.first);
}

/** Return the step at a share of the axis, limited to the shown steps. */
export function stepAt(axis: StepAxis, share: number): number {
  const step = Math.floor(axis.first + share * (axis.end - axis.first));
  return Math.min(axis.end - 1, Math.max(axis.first, step));
}

/** Return the column of a step; null if no column covers it. */
export function columnOf(edges: readonly number[], step: number): number | null {
  let [low, high] = [0, edges.length - 1];
  if (high < 1 || step < edges[0]! || step >= edges[high]!) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle]! <= step) low = middle;
    else high = middle;
  }
  return low;
}

/** Return the middle step of each column. */
export function middles(edges: readonly number[]): number[] {
  return edges.slice(1).map((end, column) => (edges[column]! + end - 1) / 2);
}

/** Name the steps of a column: `step 12`, or `steps 10–19`. */
export function nameOfColumn(edges: readonly number[], column: number): string {
  const [first, end] = [edges[column], edges[column + 1]];
  if (first === undefined || end === undefined) return "";
  return end - first === 1 ? `step ${first}` : `steps ${first}–${end - 1}`;
}

/** Return the step that was recorded last at a time; null if the time is before all records. Columns without records have no time. */
export function stepAtTime(
  grid: { edges: readonly number[]; time_ns: readonly (number | null)[] },
  time: number,
): number | null {
  let step: number | null = null;
  grid.time_ns.forEach((start, column) => {
    if (start !== null && start <= time) step = grid.edges[column + 1]! - 1;
  });
  return step;
}
