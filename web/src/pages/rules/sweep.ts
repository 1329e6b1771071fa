import { isMapping, stepsOf, type Config } from "./config";
import type { Field } from "./parameters";

// The values of one parameter that a backtest compares, and what its report says about them.

/** Name of the parameter that is the number of steps that a finding must last. */
export const DURATION = "for";

/** A range of values. */
export interface SweepRange {
  from: number;
  to: number;
  values: number;
}

const DEFAULT_VALUES = 15;
export const MOST_VALUES = 60;
const TWO_DECADES = 100;

/** A numeric parameter that can be varied. */
export interface Varied {
  name: string;
  whole: boolean;
  low: number | null;
  high: number | null;
  lowOpen: boolean;
  highOpen: boolean;
  current: number;
}

/** Return the parameters of a rule config that can be varied: numbers, and the duration. */
export function variedOf(
  fields: readonly Field[],
  parameters: Record<string, unknown>,
  config: Config,
): Varied[] {
  const numeric = fields.filter((field) => field.kind === "number" || field.kind === "integer");
  const varied: Varied[] = [];
  for (const field of numeric) {
    const value = parameters[field.name] ?? field.default;
    if (typeof value !== "number") continue; // not set, and no default: there is no range to begin with
    const { name, low, high, lowOpen, highOpen } = field;
    varied.push({ name, low, high, lowOpen, highOpen, whole: field.kind === "integer", current: value });
  }
  const steps = { low: 1, high: 1e9, lowOpen: false, highOpen: false };
  return [...varied, { name: DURATION, whole: true, ...steps, current: stepsOf(config) }];
}

/** Return a range around the present value, within the parameter's bounds. */
export function suggestedRange(of: Varied): SweepRange {
  const size = Math.abs(of.current);
  const isShare = of.low === 0 && of.high === 1 && of.current >= 0.02;
  let [from, to] = isShare
    ? [0.05, 0.95]
    : of.whole
      ? [Math.floor(of.current / 4), Math.max(of.current * 4, of.current + 4)]
      : size === 0
        ? [-1, 1]
        : of.current > 0
          ? [of.current / 100, of.current * 100]
          : [of.current * 2, 0];
  [from, to] = [clip(from, of), clip(to, of)];
  const count = of.whole ? Math.min(DEFAULT_VALUES, to - from + 1) : DEFAULT_VALUES;
  return { from: rounded(from), to: rounded(to), values: Math.max(2, count) };
}

function clip(value: number, of: Varied): number {
  const span = Math.abs(of.current) || 1;
  const low = of.low === null ? -Infinity : of.lowOpen ? of.low + (of.whole ? 1 : span / 100) : of.low;
  const high = of.high === null ? Infinity : of.highOpen ? of.high - (of.whole ? 1 : 0.001 * span) : of.high;
  return Math.min(Math.max(value, low), high);
}

function rounded(value: number): number {
  return Number(value.toPrecision(3));
}

/**
 * Return the values of a range with three digits, spaced geometrically over two decades or more, like those of
 * `watchstep rules backtest --sweep`; whole numbers for whole parameters.
 */
export function valuesOf(range: SweepRange, whole: boolean): number[] {
  const [from, to] = range.from <= range.to ? [range.from, range.to] : [range.to, range.from];
  const count = Math.min(MOST_VALUES, Math.max(1, Math.round(range.values)));
  if (!Number.isFinite(from) || !Number.isFinite(to)) return [];
  const geometric = from > 0 && to / from >= TWO_DECADES;
  const values = Array.from({ length: count }, (_, place) => {
    if (place === 0) return from;
    if (place === count - 1) return to;
    const share = place / (count - 1);
    return rounded(geometric ? from * (to / from) ** share : from + (to - from) * share);
  });
  return [...new Set(whole ? values.map(Math.round) : values)].sort((a, b) => a - b);
}

/** Return a sweep in the syntax of the API. */
export function sweepText(config: string, parameter: string, values: readonly number[]): string {
  return `${config}.${parameter}=${values.join(",")}`;
}

/**
 * Return a rule config, and all of others that may inhibit it, directly or through others. What they inhibit besides is left out: a
 * backtest refuses names of rule configs that are not part of it.
 */
export function withInhibitors(config: Config, others: readonly Config[]): Config[] {
  const nameOf = (of: Config): string => String(of["name"] || of["rule"]);
  const rest = others.filter((other) => nameOf(other) !== nameOf(config));
  const needed: Config[] = [config];
  for (const target of needed) {
    const names = [nameOf(target), String(target["rule"])];
    for (const other of rest) {
      const inhibits = Array.isArray(other["inhibits"]) ? other["inhibits"].map(String) : [];
      if (!needed.includes(other) && names.some((name) => inhibits.includes(name))) needed.push(other);
    }
  }
  const names = new Set(needed.flatMap((of) => [nameOf(of), String(of["rule"])]));
  return needed.map((of) =>
    Array.isArray(of["inhibits"])
      ? { ...of, inhibits: of["inhibits"].filter((name) => names.has(String(name))) }
      : of,
  );
}

/** The first alert of a run at one value. */
export interface SweptAlert {
  attempt: string;
  step: number;
  tensor: string;
}

/** One value of the sweep, and the runs that it alerts on. */
export interface SweptValue {
  value: number;
  current: boolean;
  alerts: ReadonlyMap<string, SweptAlert>;
}

/** A report of a backtest, as far as the page shows it. */
export interface SweptReport {
  config: string;
  parameter: string;
  values: SweptValue[];
  runs: string[];
  /** Answers of people to whether the live alert of the rule config was right, by run: yes, no or not_sure. */
  answers: ReadonlyMap<string, string>;
  /** Runs on which another rule's alert suppresses the one of this rule, at its present settings. */
  inhibited: ReadonlyMap<string, { by: string; step: number }>;
  /** The tested rule config; null if no run was evaluated. */
  tested: Config | null;
  failed: { what: string; hint: string }[];
  /** Notes of attempts, such as that the order of a live evaluation is not recorded. */
  notes: string[];
}

/** Read the report of a backtest with one sweep; null if it has none. */
export function readReport(report: Record<string, unknown> | null | undefined): SweptReport | null {
  const sweep = mappings(report?.["sweep"]);
  const setting = Object.keys(isMapping(sweep[0]?.["settings"]) ? sweep[0]["settings"] : {})[0];
  if (setting === undefined) return null;
  const dot = setting.lastIndexOf(".");
  const [config, parameter] = [setting.slice(0, dot), setting.slice(dot + 1)];
  const evaluated = mappings(report?.["runs"]);
  const attempts = evaluated.flatMap((run) => mappings(run["attempts"]));
  const tested = attempts
    .flatMap((attempt) => mappings(attempt["rules"]).map((rule) => rule["rule_config"]))
    .find((rule): rule is Config => isMapping(rule) && rule["name"] === config);
  return {
    config,
    parameter,
    values: sweep.map((entry, place) => ({
      value: Number((entry["settings"] as Record<string, unknown>)[setting]),
      current: entry["current"] === true,
      alerts: new Map(evaluated.flatMap((run) => firstAlert(run, place))),
    })),
    runs: evaluated.map((run) => String(run["run"])),
    answers: new Map(
      evaluated.flatMap((run): [string, string][] => {
        const answer = isMapping(run["was_right"]) ? run["was_right"][config] : undefined;
        return answer === undefined ? [] : [[String(run["run"]), String(answer)]];
      }),
    ),
    inhibited: new Map(evaluated.flatMap((run) => firstInhibited(run, config))),
    tested: tested ?? null,
    failed: mappings(report?.["failed"]).map((entry) => ({
      what: String(entry["what"]),
      hint: String(entry["hint"]),
    })),
    notes: [
      ...new Set(
        attempts.flatMap((attempt) => (Array.isArray(attempt["notes"]) ? attempt["notes"].map(String) : [])),
      ),
    ],
  };
}

function mappings(value: unknown): Record<string, unknown>[] {
  return Array.isArray(value) ? value.filter(isMapping) : [];
}

function firstAlert(run: Record<string, unknown>, place: number): [string, SweptAlert][] {
  const fired = Array.isArray(run["fired"]) ? (run["fired"][place] as unknown) : null;
  if (!isMapping(fired)) return [];
  const { attempt, step, tensor } = fired;
  return [
    [String(run["run"]), { attempt: String(attempt), step: Number(step), tensor: String(tensor ?? "") }],
  ];
}

function firstInhibited(
  run: Record<string, unknown>,
  config: string,
): [string, { by: string; step: number }][] {
  for (const rule of mappings(run["attempts"]).flatMap((attempt) => mappings(attempt["rules"]))) {
    if (!isMapping(rule["rule_config"]) || rule["rule_config"]["name"] !== config) continue;
    const change = mappings(rule["transitions"]).find(
      ({ phase, inhibited_by }) => phase === "firing" && Boolean(inhibited_by),
    );
    if (change)
      return [[String(run["run"]), { by: String(change["inhibited_by"]), step: Number(change["step"]) }]];
  }
  return [];
}

/**
 * What an alert of the rule on a run would be: right, if a person says so of the live alert or, without an answer, the run did not complete;
 * wrong, if a person says so. That a run completed says nothing.
 */
export type RunKind = "fault" | "wrong" | "open";

export function kindOf(run: string, report: SweptReport, states: ReadonlyMap<string, string>): RunKind {
  const answer = report.answers.get(run) ?? "";
  if (answer === "yes") return "fault";
  if (answer === "no") return "wrong";
  const state = states.get(run) ?? "completed";
  return answer === "" && state !== "completed" ? "fault" : "open";
}

/** Number of runs that a value alerts on, by what an alert on them is. */
export type AlertSplit = Record<RunKind, number>;

/** Return on how many runs a value alerts. */
export function splitOf(
  value: SweptValue,
  report: SweptReport,
  states: ReadonlyMap<string, string>,
): AlertSplit {
  const split = { fault: 0, wrong: 0, open: 0 };
  for (const run of value.alerts.keys()) split[kindOf(run, report, states)] += 1;
  return split;
}

/** Say which values alert on most runs with a fault, and among these on the fewest whose alert was not right. */
export function advice(
  report: SweptReport,
  states: ReadonlyMap<string, string>,
  show: (value: number) => string,
): string {
  const kinds = report.runs.map((run) => kindOf(run, report, states));
  const count = (kind: RunKind): number => kinds.filter((each) => each === kind).length;
  const [faults, wrong, open] = [count("fault"), count("wrong"), count("open")];
  const splits = report.values.map((value) => splitOf(value, report, states));
  const rest =
    open === 0
      ? ""
      : ` Of ${open === 1 ? "one run" : `${open} runs`} nobody has said whether an alert is right: answer on the page of the alert.`;
  if (faults === 0 && wrong === 0) return `There is no run to compare with.${rest}`;
  const most = Math.max(...splits.map((split) => split.fault));
  if (faults > 0 && most === 0)
    return `No value alerts on ${faults === 1 ? "the run with a fault" : `any of the ${faults} runs with a fault`}. Try another parameter, or another rule.`;
  const fewest = Math.min(...splits.filter((split) => split.fault === most).map((split) => split.wrong));
  const best = report.values
    .filter((_, place) => splits[place]!.fault === most && splits[place]!.wrong === fewest)
    .map(({ value }) => value);
  const found = [
    ...(faults === 0 ? [] : [`on ${most} of ${faults} ${faults === 1 ? "run" : "runs"} with a fault`]),
    ...(wrong === 0 ? [] : [`on ${fewest === 0 ? "none" : fewest} of ${wrong} whose alert was not right`]),
  ].join(" and ");
  return `Best here: ${spans(best, report, show)} – alerts ${found}.${rest}`;
}

function spans(values: readonly number[], report: SweptReport, show: (value: number) => string): string {
  const all = report.values.map(({ value }) => value);
  const parts: number[][] = [];
  for (const value of values) {
    const last = parts.at(-1);
    if (last && all.indexOf(value) === all.indexOf(last.at(-1)!) + 1) last.push(value);
    else parts.push([value]);
  }
  return parts
    .map((part) => (part.length === 1 ? show(part[0]!) : `${show(part[0]!)} to ${show(part.at(-1)!)}`))
    .join(", ");
}
