import type { Schemas } from "../../api/client";
import { formatNumber } from "../../components/format";

// Where runs differ, in words.

type Divergence = Schemas["Divergence"];
type FirstDifference = Schemas["FirstDifference"];

/** What was searched: `steps 0–271`. */
export function searchedSteps({ compared_first: first, compared_last: last }: Divergence): string {
  if (last < first) return "no common step";
  return first === last ? `step ${first}` : `steps ${first}–${last}`;
}

/** A value of a difference: null is one that is missing or not finite. */
export const describeValue = (value: number | null): string =>
  value === null ? "none or not finite" : formatNumber(value);

const COUNTS: Record<string, string> = {
  nan: "number of NaN",
  pos_inf: "number of infinite values",
  neg_inf: "number of negative infinite values",
};

/** What differs, such as `mean` or `number of NaN`. */
export const describeFigure = (figure: string): string => COUNTS[figure] ?? figure;

/** A difference in words: `number of NaN 1 instead of 0`. */
export function describeDifference(difference: FirstDifference): string {
  return `${describeFigure(difference.figure)} ${describeValue(difference.b)} instead of ${describeValue(difference.a)}`;
}

/** What was found, if it is no difference, or what limits the result; empty: nothing needs to be said. */
export function searchResult(divergence: Divergence): string {
  const steps = searchedSteps(divergence);
  if (divergence.first === null) {
    if (divergence.compared_last < divergence.compared_first)
      return divergence.notes.length > 0 ? "Nothing was compared." : "They have no step with common records.";
    if (divergence.rows === 0)
      return "Nothing was compared: no record of one run has a counterpart in the other.";
    return divergence.complete
      ? `No difference in ${steps}.`
      : `No difference was found in ${steps}; the search was not complete.`;
  }
  return divergence.complete
    ? ""
    : "The search was not complete: earlier differences of other tensors are possible.";
}

type Setting = Schemas["DifferingSetting"];
type SettingValue = Setting["values"][number];

/** The value of a setting as text. */
export const settingText = (value: SettingValue): string =>
  value === null ? "not set" : typeof value === "number" ? formatNumber(value) : String(value);

/** Return the settings in which a run differs from the reference, each in words: `learning rate 0.1 instead of 0.001 from step 30 on`. */
export function settingsOfRun(comparison: Schemas["Comparison"], run: string): string[] {
  const place = comparison.runs.findIndex(({ facts }) => facts.run === run);
  return comparison.settings.differing
    .filter(({ values }) => values[place] !== values[0])
    .map(({ name, values, step }) => {
      const from = step === null ? "" : ` from step ${step} on`;
      return `${name} ${settingText(values[place] ?? null)} instead of ${settingText(values[0] ?? null)}${from}`;
    });
}

/** What was compared, if no setting differs: `2 hyperparameters and 5 settings of the environment`. */
export function equalSettings({ compared }: Schemas["ComparedSettings"]): string {
  const count = (source: string): number => compared[source] ?? 0;
  const recorded = count("hyperparameter") === 0 ? "no hyperparameter was recorded" : null;
  const parts = [
    ...(recorded === null ? [`${count("hyperparameter")} hyperparameters`] : []),
    `${count("environment")} values of the environment`,
    `${count("config")} of the capture configuration`,
  ];
  return `None: ${parts.join(", ")} are the same in all runs${recorded === null ? "" : `; ${recorded}`}.`;
}

/** A tensor that differs in one or more runs. */
export interface DifferingTensor {
  tensor: string;
  /** First difference by run. */
  byRun: ReadonlyMap<string, FirstDifference>;
  /** The least step of them. */
  step: number;
}

/** Return the tensors that differ, by the step at which the first run of them differs; equal steps in the order of the computation. */
export function differingTensors(divergences: readonly Divergence[]): DifferingTensor[] {
  const tensors = new Map<string, Map<string, FirstDifference>>();
  for (const { run, tensors: differences } of divergences)
    for (const difference of differences) {
      const byRun = tensors.get(difference.tensor) ?? new Map<string, FirstDifference>();
      if (!byRun.has(run)) byRun.set(run, difference);
      tensors.set(difference.tensor, byRun);
    }
  return [...tensors]
    .map(([tensor, byRun]) => ({
      tensor,
      byRun,
      step: Math.min(...[...byRun.values()].map(({ step }) => step)),
    }))
    .sort((a, b) => a.step - b.step);
}
