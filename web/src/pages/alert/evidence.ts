import type { Schemas } from "../../api/client";
import { placedOn, stepsWithGaps, type LineSeries } from "../../charts/line-chart";

// The evidence of an alert as charts: one per figure, with the thresholds of the rule where it has the same axis.

type AlertPage = Schemas["AlertPage"];
type EvidenceLine = Schemas["EvidenceLine"];
type ThresholdPoint = Schemas["ThresholdPoint"];

export interface EvidenceChart {
  key: string;
  /** What the chart shows, such as `l2 of 7.weight:gradient`. */
  title: string;
  /** Whether the rule compared this figure with its threshold. */
  measured: boolean;
  x: number[];
  series: LineSeries[];
  /** Ranges of steps without a finite value. */
  nonfinite: [number, number][];
  logarithmic: boolean;
}

const WIDE_RANGE = 50;
const FLOOR = 1e-30; // statistics of empty tensors are stored as tiny numbers

/** Whether a logarithmic axis shows values better: all are positive, and the largest is far above the usual one. */
export function needsLogarithm(values: readonly (number | null)[]): boolean {
  const shown = values.filter((value) => value !== null);
  if (shown.length < 2 || shown.some((value) => value < FLOOR)) return false;
  shown.sort((a, b) => a - b);
  return shown.at(-1)! > WIDE_RANGE * shown[Math.floor(shown.length / 2)]!;
}

/** Return the findings about the tensor and worker of the alert's finding. */
export function ownFindings({ finding, series }: AlertPage): ThresholdPoint[] {
  return series.findings.filter(
    (point) => point.tensor === finding.tensor && point.worker === finding.worker,
  );
}

/** Return the charts: the measured figure first. Without it, the values that the rule stored with its findings. */
export function chartsOf(page: AlertPage): EvidenceChart[] {
  const charts = page.series.lines.map((line) => chartOf(line, page));
  if (charts.some((chart) => chart.measured)) return charts;
  const stored = storedChart(page);
  return stored === null ? charts : [stored, ...charts];
}

function chartOf(line: EvidenceLine, page: AlertPage): EvidenceChart {
  const { first, last } = page.series;
  const x = stepsWithGaps([line]);
  const series: LineSeries[] = [];
  let threshold: LineSeries["values"] | null = null;
  if (line.measures_value) {
    const fixed = page.series.fixed_threshold;
    if (fixed !== null) {
      // The line of a fixed threshold crosses the whole picture.
      if (x.length === 0 || x[0]! > first) x.unshift(first);
      if (x.at(-1)! < last) x.push(last);
      threshold = x.map(() => fixed);
    } else threshold = placedOn(x, line, thresholdsAt(line, ownFindings(page)));
  }
  const binned = line.step.some((step, entry) => step !== line.last_step[entry]);
  series.push({
    label: line.figure === "mean" ? line.tensor : `${line.figure} of ${line.tensor}`,
    values: placedOn(x, line, line.mean),
    ...(binned ? { band: { low: placedOn(x, line, line.min), high: placedOn(x, line, line.max) } } : {}),
  });
  if (threshold?.some((value) => value != null)) series.push(thresholdSeries(page, threshold));
  return {
    key: `${line.tensor} ${line.figure} ${line.mode} ${line.worker}`,
    title: `${line.figure === "mean" ? "" : `${line.figure} of `}${line.tensor}${line.mode === "train" ? "" : ` (${line.mode})`}`,
    measured: line.measures_value,
    x,
    series,
    nonfinite: nonfiniteOf(line),
    logarithmic:
      needsLogarithm(line.mean) &&
      (threshold === null || !threshold.some((value) => value != null && value <= 0)),
  };
}

function thresholdSeries(page: AlertPage, values: LineSeries["values"]): LineSeries {
  const name = page.series.fixed_parameter;
  return {
    label: name === "" ? "threshold" : `threshold (${name})`,
    values,
    dashed: true,
    colour: "--fault",
    points: values.filter((value) => value != null).length < 30,
  };
}

/** Return the threshold of each entry of a line: that of its last finding, null without one. */
function thresholdsAt(line: EvidenceLine, findings: readonly ThresholdPoint[]): (number | null)[] {
  const thresholds: (number | null)[] = line.step.map(() => null);
  for (const finding of findings) {
    const entry = line.step.findLastIndex((step) => step <= finding.step);
    if (entry >= 0 && finding.step <= line.last_step[entry]! && finding.threshold !== null)
      thresholds[entry] = finding.threshold;
  }
  return thresholds;
}

function nonfiniteOf(line: EvidenceLine): [number, number][] {
  const ranges: [number, number][] = [];
  let open: [number, number] | null = null;
  line.nonfinite.forEach((count, entry) => {
    if (count === 0) open = null;
    else if (open === null) ranges.push((open = [line.step[entry]!, line.last_step[entry]!]));
    else open[1] = line.last_step[entry]!;
  });
  return ranges;
}

function storedChart(page: AlertPage): EvidenceChart | null {
  const findings = ownFindings(page).filter((point) => point.value !== null);
  if (findings.length === 0) return null;
  const values = findings.map((point) => point.value);
  const thresholds = findings.map((point) => point.threshold);
  const steps = findings.map((point) => point.step);
  const line = { step: steps, last_step: steps };
  const x = stepsWithGaps([line]);
  const threshold = thresholds.some((value) => value !== null)
    ? [thresholdSeries(page, placedOn(x, line, thresholds))]
    : [];
  return {
    key: "findings",
    title: `Value of the rule at its findings${page.finding.tensor === "" ? "" : ` about ${page.finding.tensor}`}`,
    measured: true,
    x,
    series: [{ label: "value", values: placedOn(x, line, values), points: true }, ...threshold],
    nonfinite: [],
    logarithmic:
      needsLogarithm(values) && needsLogarithm([...values, ...thresholds.filter((value) => value !== null)]),
  };
}

/** Return the shown steps: the window, up to the last recorded step. */
export function shownRange(page: AlertPage): [number, number] {
  const { first, last } = page.series;
  return [first, Math.max(page.finding.step + 1, Math.min(last, page.run.last_step + 1))];
}

/** Return the lines of all charts as columns of a table. */
export function evidenceColumns(page: AlertPage): Record<string, (number | string | null)[]> {
  const lines = page.series.lines;
  const per = <T>(of: (line: EvidenceLine) => readonly T[]): T[] => lines.flatMap((line) => [...of(line)]);
  return {
    tensor: per((line) => line.step.map(() => line.tensor)),
    figure: per((line) => line.step.map(() => line.figure)),
    mode: per((line) => line.step.map(() => line.mode)),
    worker: per((line) => line.step.map(() => line.worker)),
    first_step: per((line) => line.step),
    last_step: per((line) => line.last_step),
    mean: per((line) => line.mean),
    min: per((line) => line.min),
    max: per((line) => line.max),
    nonfinite: per((line) => line.nonfinite),
    threshold: per((line) =>
      !line.measures_value
        ? line.step.map(() => null)
        : page.series.fixed_threshold === null
          ? thresholdsAt(line, ownFindings(page))
          : line.step.map(() => page.series.fixed_threshold),
    ),
  };
}
