// The matchers of a silence.

/** Labels that every alert has, in the order in which they are offered; the silence is of the project anyway. */
const OFFERED = ["run", "name", "rule", "severity"];
const CHOSEN = ["run", "name"];

/** A label of the alert that a silence may match. */
export interface LabelChoice {
  label: string;
  value: string;
  /** Whether it is chosen at first: this rule on this run. */
  chosen: boolean;
}

/** Return the labels of an alert that a silence may match. */
export function labelChoices(labels: Readonly<Record<string, string>>): LabelChoice[] {
  const names = [
    ...OFFERED.filter((label) => label in labels),
    ...Object.keys(labels)
      .filter((label) => !OFFERED.includes(label) && label !== "project")
      .sort(),
  ];
  return names.map((label) => ({ label, value: labels[label]!, chosen: CHOSEN.includes(label) }));
}

/** Write a matcher for exactly this value. */
export function matcherOf(label: string, value: string): string {
  return `${label}="${value.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
}

/** Return the matchers of a form: those of the chosen labels, and one of each line. */
export function matchersOf(
  choices: readonly LabelChoice[],
  chosen: ReadonlySet<string>,
  lines: string,
): string[] {
  const written = lines.split("\n").map((line) => line.trim());
  return [
    ...choices.filter(({ label }) => chosen.has(label)).map(({ label, value }) => matcherOf(label, value)),
    ...written.filter((line) => line !== ""),
  ];
}

/** Durations that are offered. */
export const DURATIONS: readonly { seconds: number; text: string }[] = [
  { seconds: 3600, text: "1 hour" },
  { seconds: 4 * 3600, text: "4 hours" },
  { seconds: 12 * 3600, text: "12 hours" },
  { seconds: 86_400, text: "1 day" },
  { seconds: 3 * 86_400, text: "3 days" },
  { seconds: 7 * 86_400, text: "1 week" },
];
