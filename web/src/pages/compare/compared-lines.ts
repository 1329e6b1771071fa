import type { Schemas } from "../../api/client";
import type { ChartMark, LineSeries } from "../../charts/line-chart";

// Series of several runs as charts.

type Series = Schemas["ComparedSeries"];
type Grid = Schemas["ComparisonGrid"];
type Divergence = Schemas["Divergence"];

const NANOSECONDS = 1e9;
const WIDE_RANGE = 50;
const COLOURS = 8;

/** Name of the colour of a run, by its place in the comparison. */
export const runColour = (place: number): string => `--series-${(place % COLOURS) + 1}`;

/** Return the middle of each column: a step, or seconds since the first row of each run. */
export function positions({ align, edges }: Grid): number[] {
  return edges.slice(1).map((end, column) => {
    const middle = (edges[column]! + end - 1) / 2;
    return align === "time" ? Math.round(middle / 1e6) / 1e3 : middle;
  });
}

/**
 * Return one line per run, with a gap where nothing was recorded and where values are not finite. A band shows the
 * least and largest value where columns join several steps. Of two runs, the second is dashed, so that both are visible where they
 * are equal.
 */
export function linesOf(series: Series, runs: readonly string[]): LineSeries[] {
  return series.lines.map((line) => {
    const place = runs.indexOf(line.run);
    return {
      label: line.run,
      values: line.mean,
      ...(line.count.some((count) => count > line.workers)
        ? { band: { low: line.min, high: line.max } }
        : {}),
      colour: runColour(place),
      dashed: runs.length === 2 && place === 1,
    };
  });
}

/** Return marks at the steps at which the tensor of a series first differs; without it, where the runs first differ at all. */
export function marksOf(series: Series, divergences: readonly Divergence[]): ChartMark[] {
  const marks: ChartMark[] = [];
  for (const { run, first, tensors } of divergences) {
    const own = tensors.find(({ tensor }) => tensor === series.tensor);
    if (own !== undefined) marks.push({ x: own.step, label: `${run} differs here first`, tone: "fault" });
    else if (first !== null)
      marks.push({ x: first.step, label: `${run} differs in ${first.tensor}`, tone: "quiet" });
  }
  return marks;
}

/** Whether a logarithmic axis shows the lines better: all values are positive, and the largest is far above the usual one. */
export function isLogarithmic(series: Series): boolean {
  const values = series.lines.flatMap((line) => line.mean).filter((value) => value !== null);
  if (values.length < 2 || values.some((value) => value <= 0)) return false;
  values.sort((a, b) => a - b);
  return values.at(-1)! > WIDE_RANGE * values[Math.floor(values.length / 2)]!;
}

/** In which runs, and from which position on, a series has values that are not finite. */
export function nonfiniteNotes(series: Series, grid: Grid): string[] {
  return series.lines.flatMap((line) => {
    const column = line.nonfinite.findIndex((count) => count > 0);
    if (column < 0) return [];
    const edge = grid.edges[column]!;
    return [
      `${line.run}: not finite from ${grid.align === "time" ? `${(edge / NANOSECONDS).toFixed(1)} s` : `step ${edge}`} on`,
    ];
  });
}

/** Return the series as columns of a table. */
export function comparisonColumns(
  series: readonly Series[],
  grid: Grid,
): Record<string, readonly (number | null)[]> {
  const unit = grid.align === "time" ? "ns" : "step";
  const columns: Record<string, readonly (number | null)[]> = {
    [`first_${unit}`]: grid.edges.slice(0, -1),
    [`last_${unit}`]: grid.edges.slice(1).map((end) => end - 1),
  };
  for (const entry of series)
    for (const line of entry.lines) {
      const name = `${line.run} ${entry.tensor} ${entry.figure} ${entry.mode}`;
      columns[name] = line.mean;
      columns[`${name} min`] = line.min;
      columns[`${name} max`] = line.max;
    }
  return columns;
}
