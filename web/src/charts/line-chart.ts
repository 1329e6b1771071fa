import { formatRounded } from "../components/format";

// What `line-chart.svelte` draws, and its conversion to uPlot's columns.

/**
 * A line of a chart: one value per entry of the chart's `x`. Null is a gap; over undefined entries the line continues. A value without a
 * neighbour is a point.
 */
export interface LineSeries {
  label: string;
  values: readonly (number | null | undefined)[];
  /** Lower and upper end of a band around the line, such as the least and largest value of a bin. */
  band?: { low: readonly (number | null | undefined)[]; high: readonly (number | null | undefined)[] };
  /** Name of a colour of `theme.css`; default: by its place. */
  colour?: string;
  dashed?: boolean;
  /** Whether each value has a dot; default: if there are few. */
  points?: boolean;
}

/** Points of a line: each joins the records of the steps `step[i]` to `last_step[i]`. */
export interface StepPoints {
  readonly step: readonly number[];
  readonly last_step: readonly number[];
}

/**
 * Return whether each point is connected with the next one: no step between them was skipped. A slope over steps that were not measured
 * would show values that nobody saw. Where points join several steps, a distance of one point is no gap.
 */
function connections({ step, last_step: last }: StepPoints): boolean[] {
  let width = 1;
  step.forEach((first, place) => (width = Math.max(width, last[place]! - first + 1)));
  return step.slice(1).map((next, place) => next - last[place]! <= width);
}

/** Return the steps of an axis that has the points of lines, and an entry in each of their gaps. */
export function stepsWithGaps(lines: readonly StepPoints[]): number[] {
  const steps = new Set<number>();
  for (const line of lines) {
    const connected = connections(line);
    line.step.forEach((step, place) => {
      steps.add(step);
      if (connected[place] === false) steps.add(line.last_step[place]! + 1);
    });
  }
  return [...steps].sort((a, b) => a - b);
}

/** Place the values of a line on an axis: null in its gaps, undefined between connected points. */
export function placedOn(
  x: readonly number[],
  line: StepPoints,
  values: readonly (number | null)[],
): (number | null | undefined)[] {
  const connected = connections(line);
  let place = -1;
  return x.map((step) => {
    if (line.step[place + 1] === step) return values[++place] ?? null;
    return connected[place] === true ? undefined : null;
  });
}

/** Return the entries without a neighbour, which a line does not show. */
export function alone(values: readonly (number | null | undefined)[]): number[] {
  const places: number[] = [];
  let before = false;
  let last = -1; // a value whose next neighbour is not known yet, and that has none before it
  values.forEach((value, place) => {
    if (value === undefined) return;
    if (last >= 0 && value === null) places.push(last);
    last = value !== null && !before ? place : -1;
    before = value !== null;
  });
  return last >= 0 ? [...places, last] : places;
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

/** A number at a tick of an axis: short, without zeros at the end of a mantissa. */
export function formatTick(value: number): string {
  return formatRounded(value).replace(/\.?0+e/, "e");
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
