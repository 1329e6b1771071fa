import type { Schemas } from "../../api/client";
import { formatCount, formatNumber, formatShare } from "../../components/format";

// Tensors that were bad when an alert fired: those with NaN or infinity in the order of the computation, then the worst first.

type Deviation = Schemas["Deviation"];

/** A tensor beyond its usual range, or one of which the rule found something, or both. */
export interface BadTensor {
  tensor: string;
  step: number;
  worker: number;
  deviation: Deviation | null;
  /** What the rule found first; null if it found nothing of this tensor. */
  finding: { value: number | null; threshold: number | null } | null;
  /** Other tensors of the same parameter or module, such as its optimizer state, of which the rule found something. */
  related: string[];
}

const LARGEST = 1_000_000; // the service reports no larger distance
const TINY = 1e-30; // below it, an end of a range means zero

const STATISTICS: Record<string, string> = {
  mean: "mean",
  rms: "root mean square",
  abs_max: "largest magnitude",
};

const NONFINITE_RULES = ["nan_or_inf", "non_finite_values"];

/** Whether the values of a rule's findings are numbers of elements that are not finite. */
export const countsNonfinite = ({ rule }: Schemas["FiredRule"]): boolean => NONFINITE_RULES.includes(rule);

/**
 * Rank tensors. Those with NaN or infinity are first, by step and in the order of the computation: the size of a tensor says nothing about
 * the cause. The others follow by their distance from the usual range, then what the rule found, by step and by how far it is beyond the
 * threshold. Of what the rule found, tensors of the same parameter or module are one entry.
 */
export function rankTensors(page: Schemas["AlertPage"]): BadTensor[] {
  const deviating = new Map<string, BadTensor>();
  for (const deviation of page.deviations.deviations) {
    const { tensor, step, worker } = deviation;
    deviating.set(tensor, { tensor, step, worker, deviation, finding: null, related: [] });
  }
  const found = new Map<string, BadTensor>();
  for (const { tensor, step, worker, value, threshold } of page.series.findings) {
    if (tensor === "" || step > page.finding.step) continue;
    const finding = { value, threshold };
    const entry = deviating.get(tensor);
    if (entry !== undefined) entry.finding ??= finding;
    else if (!found.has(tensor))
      found.set(tensor, { tensor, step, worker, deviation: null, finding, related: [] });
  }
  const flow = new Map(page.computation.map((tensor, place) => [tensor, place]));
  const isDamaged = ({ deviation, finding }: BadTensor): boolean =>
    deviation?.statistic === "nonfinite_share" || (finding !== null && countsNonfinite(page.rule));
  const entries = [...deviating.values(), ...grouped([...found.values()])];
  const damaged = entries.filter(isDamaged).sort((a, b) => {
    const [first, second] = [flow.get(a.tensor) ?? flow.size, flow.get(b.tensor) ?? flow.size];
    return a.step - b.step || first - second;
  });
  return [...damaged, ...entries.filter((entry) => !isDamaged(entry))];
}

/** Join tensors of the same parameter or module: the plainest of the earliest step stands for the others. */
function grouped(found: readonly BadTensor[]): BadTensor[] {
  const groups = new Map<string, BadTensor[]>();
  for (const entry of found) {
    const owner = entry.tensor.split(":", 1)[0]!;
    groups.set(owner, [...(groups.get(owner) ?? []), entry]);
  }
  const first = [...groups.values()].map((members): BadTensor => {
    members.sort((a, b) => a.step - b.step || derivations(a.tensor) - derivations(b.tensor));
    return { ...members[0]!, related: members.slice(1).map(({ tensor }) => tensor) };
  });
  return first.sort((a, b) => a.step - b.step || excess(b) - excess(a));
}

/** How far a tensor is from what the network computes: states of the optimizer and checks of tensors are derived from others. */
function derivations(tensor: string): number {
  return tensor.split(":").length + (tensor.endsWith(":finite_check") ? 10 : 0);
}

function excess({ finding }: BadTensor): number {
  if (finding?.value == null) return Infinity; // not finite
  const threshold = finding.threshold ?? 0;
  const distance = Math.abs(finding.value - threshold);
  return threshold === 0 ? distance : distance / Math.abs(threshold);
}

/** What a tensor is to its parameter or module: `gradient`, `exp_avg`; `value` for the parameter itself. */
export function partOf(tensor: string): string {
  const part = tensor.includes(":") ? tensor.slice(tensor.indexOf(":") + 1) : "";
  return part.replace(/:?finite_check$/, "") || "value";
}

/** How far a deviation is beyond the usual range, between 0 and 1, by its logarithm. */
export function barOf(deviation: Deviation): number {
  const share = Math.log10(Math.max(1, deviation.spreads)) / Math.log10(LARGEST);
  return Math.min(1, Math.max(0.02, share));
}

/** The deviation in words: `mean 12.3, usually 0.1 to 0.4`. */
export function describeDeviation(deviation: Deviation): string {
  const { statistic, value } = deviation;
  if (statistic === "nonfinite_share") return `${formatShare(value)} of its values are not finite`;
  const zeroed = (end: number): number => (Math.abs(end) < TINY ? 0 : end);
  const [low, high] = [zeroed(deviation.low), zeroed(deviation.high)];
  const usual = low === high ? formatNumber(low) : `${formatNumber(low)} to ${formatNumber(high)}`;
  return `${STATISTICS[statistic] ?? statistic} ${formatNumber(value)}, usually ${usual}; ${describeDistance(deviation)} off`;
}

/** The distance from the expected value: `12.5 deviations`. */
function describeDistance(deviation: Deviation): string {
  if (deviation.spreads >= LARGEST) return "over 1,000,000 deviations";
  const digits = deviation.spreads < 10 ? 1 : 0;
  return `${deviation.spreads.toLocaleString("en-US", { maximumFractionDigits: digits })} deviations`;
}

/** What the rule found, in words; of a rule that counts elements that are not finite, their number. */
export function describeFinding(
  finding: { value: number | null; threshold: number | null },
  isCount = false,
): string {
  if (isCount && finding.value !== null)
    return `${formatCount(finding.value)} ${finding.value === 1 ? "element is" : "elements are"} not finite`;
  const value = finding.value === null ? "not finite" : formatNumber(finding.value);
  return `the rule measured ${value}${finding.threshold === null ? "" : `, threshold ${formatNumber(finding.threshold)}`}`;
}
