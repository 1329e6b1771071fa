import type { Schemas } from "../../api/client";
import { placedOn, stepsWithGaps, type LineSeries } from "../../charts/line-chart";

// Series of a tensor's statistics as charts, with the thresholds of the rules that watch them.

type Page = Schemas["TensorPage"];
type Figures = Schemas["FigureLines"];
type Line = Schemas["LineOutput"];

export const MOST_FIGURES = 12;

/** Statistics that show most, by the role that a tensor's name says. */
export function usualFigures(tensor: string): string[] {
  if (/:(gradient|update)$/.test(tensor)) return ["l2", "abs_mean", "abs_max", "zero_share"];
  if (/:(output|input)$/.test(tensor)) return ["mean", "std", "abs_max", "zero_share"];
  if (/:finite_check$/.test(tensor)) return ["nonfinite_share"];
  return ["l2", "mean", "std", "abs_max"];
}

/** Statistics of a single number, such as a loss: its value. */
export const FIGURES_OF_NUMBER = ["mean"];

/** Return the statistics of the address, without repetitions. */
export function parseFigures(text: string): string[] {
  return [...new Set(text.split(",").filter(Boolean))].slice(0, MOST_FIGURES);
}

/** A chart of one statistic. */
export interface FigureChart {
  x: number[];
  series: LineSeries[];
  logarithmic: boolean;
  /** Thresholds and other facts that the chart does not show, as text. */
  notes: string[];
}

/** How the vertical axis is chosen. */
export type Scale = "auto" | "linear" | "log";
const WIDE = 50; // largest over usual value, from which on a logarithmic axis shows more
const FAR = 3; // heights of the chart, up to which a threshold outside the values is shown

/** Return the chart of a statistic. */
export function chartOf(page: Page, figures: Figures, scale: Scale): FigureChart {
  const x = stepsWithGaps(figures.lines);
  const binned = figures.lines.some((line) => line.count.some((count) => count > 1));
  const series: LineSeries[] = figures.lines.map((line) => ({
    label: nameOfLine(line, figures.lines, figures.figure),
    values: placedOn(x, line, line.mean),
    ...(binned ? { band: { low: placedOn(x, line, line.min), high: placedOn(x, line, line.max) } } : {}),
    dashed: line.mode !== "train" && figures.lines.some((other) => other.mode === "train"),
  }));
  const values = figures.lines.flatMap((line) => line.mean).filter((value) => value !== null);
  const logarithmic = isLogarithmic(values, scale);
  const chart: FigureChart = { x, series, logarithmic, notes: [] };
  if (scale === "log" && !logarithmic) chart.notes.push("Not logarithmic: no value is positive.");
  let nonfinite = 0;
  let [first, last] = [Infinity, -Infinity];
  for (const line of figures.lines)
    line.nonfinite.forEach((count, index) => {
      if (count === 0) return;
      nonfinite += count;
      first = Math.min(first, line.step[index]!);
      last = Math.max(last, line.last_step[index]!);
    });
  if (nonfinite > 0)
    chart.notes.push(
      nonfinite === 1
        ? `The record of step ${first} has no finite value.`
        : `${nonfinite} records of steps ${first}–${last} have no finite value.`,
    );
  if (figures.left_out > 0)
    chart.notes.push(`${figures.left_out} more lines are left out: choose a worker or a mode.`);
  addThresholds(chart, page, figures, values);
  return chart;
}

function isLogarithmic(values: readonly number[], scale: Scale): boolean {
  if (scale === "linear" || !values.some((value) => value > 0)) return false;
  if (scale === "log") return true;
  if (values.some((value) => value <= 0)) return false;
  const sorted = [...values].sort((a, b) => a - b);
  const usual = sorted[Math.floor(sorted.length / 2)]!;
  return sorted.at(-1)! > WIDE * usual || usual > WIDE * sorted[0]!;
}

function nameOfLine(line: Line, lines: readonly Line[], figure: string): string {
  const differs = (field: "mode" | "worker" | "replica" | "stage"): boolean =>
    lines.some((other) => other[field] !== line[field]);
  const parts = [
    ...(differs("mode") ? [line.mode] : []),
    ...(differs("worker") ? [`worker ${line.worker}`] : []),
    ...(differs("replica") ? [`replica ${line.replica}`] : []),
    ...(differs("stage") ? [line.stage] : []),
  ];
  return parts.length === 0 ? figure : parts.join(", ");
}

const TONES: { [severity: string]: string } = { critical: "--fault", warning: "--warning", info: "--muted" };

function addThresholds(chart: FigureChart, page: Page, figures: Figures, values: readonly number[]): void {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const isNear = (threshold: number): boolean => {
    if (chart.logarithmic) return threshold > 0;
    const height = high - low || Math.abs(high) || 1;
    return threshold > low - FAR * height && threshold < high + FAR * height;
  };
  for (const rule of page.rules) {
    const colour = TONES[rule.severity] ?? "--muted";
    for (const threshold of rule.thresholds) {
      if (threshold.figure !== figures.figure) continue;
      const text = `${rule.name} ${threshold.side} ${exact(threshold.value)}`;
      if (values.length > 0 && isNear(threshold.value))
        chart.series.push({
          label: text,
          values: chart.x.map(() => threshold.value),
          colour,
          dashed: true,
        });
      else chart.notes.push(`Outside of the chart: ${text}.`);
    }
    if (!measures(figures, rule.findings)) continue;
    const limits: (number | null)[] = chart.x.map(() => null);
    const margin = Math.ceil(chart.x.length / 80); // a single point would not be visible
    for (const finding of rule.findings) {
      const index = chart.x.findLastIndex((step) => step <= finding.step);
      if (index < 0) continue;
      for (let near = Math.max(0, index - margin); near <= index + margin && near < limits.length; near += 1)
        if (near === index || limits[near] === null) limits[near] = finding.threshold;
    }
    if (limits.some((limit) => limit !== null && (!chart.logarithmic || limit > 0)))
      chart.series.push({
        label: `${rule.name}: threshold at its findings`,
        values: limits,
        colour,
        dashed: true,
      });
  }
}

const exact = (value: number): string => String(Number(value.toPrecision(4))).replace("-", "−");

const CLOSE = 1e-6;

/**
 * Whether the findings' values are values of this statistic. Rules state them in their own unit, so the values are compared: those of
 * single steps must be equal, those of ranges of steps must be within the range, and one must be equal to a recorded value.
 */
export function measures(figures: Figures, findings: readonly Schemas["RecordedThreshold"][]): boolean {
  let equal = false;
  let compared = 0;
  for (const finding of findings) {
    const { value } = finding;
    if (value === null || value === 0 || finding.threshold === null) continue;
    const line = figures.lines.find(
      (candidate) => candidate.worker === finding.worker && candidate.mode === finding.mode,
    );
    const place =
      line?.step.findIndex((step, index) => step <= finding.step && finding.step <= line.last_step[index]!) ??
      -1;
    const [low, high] = [line?.min[place] ?? null, line?.max[place] ?? null];
    if (low === null || high === null) continue; // not in the shown steps
    const margin = Math.abs(value) * CLOSE;
    if (value < low - margin || value > high + margin) return false;
    compared += 1;
    equal ||= Math.abs(value - low) <= margin || Math.abs(value - high) <= margin;
  }
  return compared > 0 && equal;
}

/** Return the columns of a chart's lines as a table. */
export function columnsOf(page: Page): { [name: string]: (number | string | null)[] } {
  const columns: { [name: string]: (number | string | null)[] } = {
    figure: [],
    mode: [],
    worker: [],
    step: [],
    last_step: [],
    count: [],
    mean: [],
    min: [],
    max: [],
  };
  for (const { figure, lines } of page.series)
    for (const line of lines)
      line.step.forEach((step, index) => {
        columns.figure!.push(figure);
        columns.mode!.push(line.mode);
        columns.worker!.push(line.worker);
        columns.step!.push(step);
        columns.last_step!.push(line.last_step[index]!);
        columns.count!.push(line.count[index]!);
        columns.mean!.push(line.mean[index] ?? null);
        columns.min!.push(line.min[index] ?? null);
        columns.max!.push(line.max[index] ?? null);
      });
  return columns;
}
