import { formatNumber } from "../components/format";

// What `line-chart.svelte` draws, and its conversion to uPlot's columns.

/** A line of a chart: one value per entry of the chart's `x`. Null is a gap; over undefined entries the line continues. */
export interface LineSeries {
  label: string;
  values: readonly (number | null | undefined)[];
  /** Lower and upper end of a band around the line, such as the least and largest value of a bin. */
  band?: { low: readonly (number | null)[]; high: readonly (number | null)[] };
  /** Name of a colour of `theme.css`; default: by its place. */
  colour?: string;
  dashed?: boolean;
  /** Whether the line continues over entries without a value, for series that are recorded less often than others of the chart. */
  spanGaps?: boolean;
  /** Whether each value has a dot; default: if there are few. */
  points?: boolean;
}

/** A mark at a step: an alert, an event, a restart. */
export interface ChartMark {
  x: number;
  label: string;
  tone: "fault" | "warning" | "quiet";
  href?: string;
}

/** Return values of exponential smoothing, debiased as in TensorBoard and W&B, so that the first values are not pulled to zero. */
export function smooth(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return [...values];
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return value;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

/** Replace what a logarithmic axis cannot show by null. */
export function positiveOnly<T extends number | null | undefined>(values: readonly T[]): (T | null)[] {
  return values.map((value) => (value === undefined || (value !== null && value > 0) ? value : null));
}

/** A number at a tick of an axis: as elsewhere, without zeros at the end of a mantissa. */
export function formatTick(value: number): string {
  return formatNumber(value).replace(/\.?0+e/, "e");
}

const MOST_TICKS = 6;

/** Return ticks of a logarithmic axis: powers of ten, as many as are readable; within two decades also 2 and 5 times them. */
export function logTicks(low: number, high: number): number[] {
  if (!(low > 0) || !Number.isFinite(high)) return [];
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((last - first) / MOST_TICKS));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  const ticks: number[] = [];
  for (let power = first; power <= last; power += every)
    for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
  return ticks.filter((tick) => tick >= low && tick <= high);
}
