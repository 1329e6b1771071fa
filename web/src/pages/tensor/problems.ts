import type { Schemas } from "../../api/client";
import { formatCount, formatNumber, formatShare } from "../../components/format";

// What is wrong with a tensor: what rules found in it, and what its statistics show even if no rule watches for it.

type Page = Schemas["TensorPage"];
type Alert = Schemas["AlertOutput"];

/** What a rule config found that concerns the tensor. */
export interface Problem {
  name: string;
  severity: string;
  /** Phase of its alert; empty if it has none: the findings were too few, or another rule explains them. */
  phase: string;
  /** Fingerprint of its alert; empty if it has none. */
  fingerprint: string;
  /** `here`: the alert is about this tensor, or findings are; `origin`: another tensor's alert began here. */
  relation: "here" | "origin";
  /** Tensor that the alert is about, if it is another one; else empty. */
  elsewhere: string;
  first: number;
  last: number;
  count: number;
  message: string;
}

const SEVERITIES = ["critical", "warning", "info"];
const PHASES = ["firing", "pending", "", "resolved"];

/** Return what rules found, the most important first: firing before resolved, then by severity and step. */
export function problemsOf(page: Page, alerts: readonly Alert[]): Problem[] {
  const name = page.tensor.name;
  const problems: Problem[] = [];
  const byRule = new Map<string, Alert>();
  for (const alert of alerts) if (!byRule.has(alert.name)) byRule.set(alert.name, alert); // newest first
  for (const rule of page.rules) {
    const [first] = rule.findings;
    if (first === undefined) continue;
    const alert = byRule.get(rule.name);
    const about = textOf(alert, "tensor");
    problems.push({
      name: rule.name,
      severity: rule.severity,
      phase: alert?.phase ?? "",
      fingerprint: alert?.fingerprint ?? "",
      relation: "here",
      elsewhere: about === name ? "" : about,
      first: Math.min(...rule.findings.map((finding) => finding.step)),
      last: Math.max(...rule.findings.map((finding) => finding.step)),
      count: rule.findings.length + rule.left_out,
      message: first.message,
    });
  }
  for (const alert of byRule.values()) {
    if (problems.some((problem) => problem.name === alert.name)) continue;
    const about = textOf(alert, "tensor");
    const upstream = alert.finding?.upstream;
    const began =
      textOf(alert, "origin") === name || (Array.isArray(upstream) && upstream.some((each) => each === name));
    if (about !== name && !began) continue;
    const step = stepOf(alert);
    problems.push({
      name: alert.name,
      severity: alert.severity,
      phase: alert.phase,
      fingerprint: alert.fingerprint,
      relation: about === name ? "here" : "origin",
      elsewhere: about === name ? "" : about,
      first: step,
      last: step,
      count: 1,
      message: textOf(alert, "message"),
    });
  }
  const key = (problem: Problem): number[] => [
    PHASES.indexOf(problem.phase),
    SEVERITIES.indexOf(problem.severity),
    problem.first,
  ];
  return problems.sort((a, b) => compare(key(a), key(b)));
}

function compare(a: readonly number[], b: readonly number[]): number {
  for (const [place, value] of a.entries()) if (value !== b[place]) return value - b[place]!;
  return 0;
}

function textOf(alert: Alert | undefined, field: string): string {
  const value = alert?.finding?.[field];
  return typeof value === "string" ? value : "";
}

function stepOf(alert: Alert): number {
  const step = alert.finding?.step;
  return typeof step === "number" ? step : alert.since_step;
}

/** Something that the statistics show, with the step at which to look. */
export interface Observation {
  tone: "fault" | "warning" | "quiet";
  text: string;
  step: number | null;
}

/** Return what the statistics show in the shown steps, whether or not a rule watches for it. */
export function observationsOf(page: Page): Observation[] {
  const found: Observation[] = [];
  const { histogram } = page;
  if (histogram !== null) {
    const bad = histogram.nonfinite.flatMap((count, row) => (count > 0 ? [row] : []));
    const [first, last] = [bad[0], bad.at(-1)];
    if (first !== undefined && last !== undefined) {
      const total = totalOf(histogram, first);
      found.push({
        tone: "fault",
        text:
          `NaN or infinite: ${formatCount(histogram.nonfinite[first])} of ${formatCount(total)} elements ` +
          `${stepsOf(histogram, first)}` +
          (bad.length > 1 ? `, and in later records up to step ${histogram.last[last]!}.` : "."),
        step: histogram.first[first]!,
      });
    }
    const zero = zerosFrom(histogram);
    if (zero !== null && page.tensor.role !== "metric" && page.tensor.role !== "loss")
      found.push({
        tone: "warning",
        text: `Every element is zero from ${zero === histogram.first[0] ? "the first shown step on" : `step ${zero} on`}.`,
        step: zero,
      });
  }
  if (histogram !== null && page.tensor.shape.length > 0) found.push(...changesOf(histogram));
  const own = FORMAT_OF[page.tensor.dtype];
  const format = page.headroom.formats.find((entry) => entry.format === own);
  if (format !== undefined && (format.state === "overflow" || format.state === "close"))
    found.push({
      tone: format.state === "overflow" ? "fault" : "warning",
      text: `Its largest magnitude, ${formatNumber(page.headroom.largest)}, is at the limit of its own format, ${own}.`,
      step: page.headroom.largest_step,
    });
  return found;
}

/** Number formats by the names of data types of PyTorch, NumPy and safetensors. */
const FORMAT_OF: Record<string, string> = {
  float16: "fp16",
  bfloat16: "bf16",
  float32: "fp32",
  float8_e4m3fn: "fp8_e4m3",
  float8_e5m2: "fp8_e5m2",
};

type Histogram = Schemas["HistogramOutput"];

const FEW_ZEROS = 0.5;
const MANY_ZEROS = 0.9;
const LARGE_CHANGE = 1000;

/** Return what is different at the last record from the first one: many more zeros, or magnitudes of another size. */
function changesOf(histogram: Histogram): Observation[] {
  const rows = histogram.zeros.flatMap((_, row) => (totalOf(histogram, row) > 0 ? [row] : []));
  // A record without a finite element has no magnitude to compare.
  const finite = rows.filter((row) => typicalMagnitude(histogram, row) !== null);
  const [first, last] = [finite[0], finite.at(-1)];
  if (first === undefined || last === undefined || first === last) return [];
  const found: Observation[] = [];
  const zeroShare = (row: number): number => histogram.zeros[row]! / totalOf(histogram, row);
  const [before, after] = [zeroShare(first), zeroShare(last)];
  if (before < FEW_ZEROS && after > MANY_ZEROS)
    found.push({
      tone: "warning",
      text: `${formatShare(after)} of the elements are zero ${stepsOf(histogram, last)}; at first they were ${formatShare(before)}.`,
      step: histogram.first[last]!,
    });
  const [from, to] = [typicalMagnitude(histogram, first)!, typicalMagnitude(histogram, last)!];
  const ratio = to / from;
  if (ratio >= LARGE_CHANGE || ratio <= 1 / LARGE_CHANGE)
    found.push({
      tone: "warning",
      text: `A typical magnitude ${ratio > 1 ? "grew" : "fell"} from about ${formatNumber(from)} to about ${formatNumber(to)} in the shown steps.`,
      step: histogram.first[last]!,
    });
  return found;
}

/** Return the middle of the bin of the median magnitude of the elements that are finite and not zero; null without any. */
function typicalMagnitude(histogram: Histogram, row: number): number | null {
  const bins = (histogram.counts[row] ?? []).flatMap((count, bin) => {
    const [lower, upper] = [Math.abs(histogram.lower[bin] ?? 0), Math.abs(histogram.upper[bin] ?? 0)];
    return count > 0 ? [{ count, size: Math.sqrt(lower * upper) }] : [];
  });
  bins.sort((a, b) => a.size - b.size);
  let rest = bins.reduce((sum, bin) => sum + bin.count, 0) / 2;
  for (const bin of bins) {
    rest -= bin.count;
    if (rest <= 0) return bin.size;
  }
  return null;
}

function totalOf(histogram: Histogram, row: number): number {
  const finite = histogram.counts[row]?.reduce((sum, count) => sum + count, 0) ?? 0;
  return finite + (histogram.zeros[row] ?? 0) + (histogram.nonfinite[row] ?? 0);
}

/** Return the first step of the records up to the last one in which every element is zero; null if the last one has others. */
function zerosFrom(histogram: Histogram): number | null {
  let from: number | null = null;
  for (let row = histogram.zeros.length - 1; row >= 0; row -= 1) {
    const total = totalOf(histogram, row);
    if (total === 0) continue;
    if (histogram.zeros[row] !== total) break;
    from = histogram.first[row]!;
  }
  return from;
}

function stepsOf(histogram: Histogram, row: number): string {
  const [first, last] = [histogram.first[row]!, histogram.last[row]!];
  return first === last ? `at step ${first}` : `at steps ${first}–${last}`;
}

/** The state of the tensor in one sentence. */
export interface TensorVerdict {
  tone: "fault" | "warning" | "ok" | "quiet";
  title: string;
}

/** Return the state of the tensor in one sentence. */
export function verdictOf(
  page: Page,
  problems: readonly Problem[],
  observations: readonly Observation[],
): TensorVerdict {
  const [main] = problems;
  if (main !== undefined) {
    const firing = problems.filter((problem) => problem.phase === "firing");
    const others = problems.length - 1;
    const also = others === 0 ? "" : others === 1 ? " and another rule" : ` and ${others} other rules`;
    const verb = main.relation === "origin" ? "began here" : "found it bad";
    const tone = firing.some((each) => each.severity === "critical")
      ? "fault"
      : main.phase === "resolved"
        ? "ok"
        : "warning";
    return {
      tone,
      title:
        main.phase === "resolved"
          ? `Bad at step ${main.first}, resolved since: ${main.name}${also}`
          : main.relation === "origin"
            ? `The failure that ${main.name} reported at step ${main.first} ${verb}${also === "" ? "" : also + " concerns it"}`
            : `Bad from step ${main.first}: ${main.name}${also}`,
    };
  }
  const [seen] = observations;
  if (seen !== undefined && seen.tone !== "quiet")
    return {
      tone: seen.tone === "fault" ? "fault" : "warning",
      title: "No rule reported this tensor, but its values are unusual",
    };
  const count = page.rules.length;
  if (count === 0) return { tone: "quiet", title: "No rule watches this tensor" };
  return {
    tone: "ok",
    title:
      count === 1
        ? "The rule that watches this tensor found nothing"
        : `None of the ${count} rules that watch this tensor found anything`,
  };
}
