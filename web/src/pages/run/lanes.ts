import type { Schemas } from "../../api/client";
import { shareOf, type StepAxis } from "./step-axis";

type Lane = Schemas["RuleLane"];
type Mark = Schemas["RunMark"];

/** A part of a lane in pixels. */
export interface LanePart {
  state: Lane["intervals"][number]["state"];
  left: number;
  width: number;
  /** What the state is, for people who point at it or cannot see it. */
  text: string;
}

const LEAST_WIDTH = 3; // a state of a few steps is visible among ten thousand
const STATES: Record<LanePart["state"], string> = {
  ok: "ok",
  pending: "pending",
  firing: "firing",
  resolved: "resolved",
  no_data: "no data",
  error: "error",
};

/** Name of a state. */
export const nameOfState = (state: LanePart["state"]): string => STATES[state];

/** Whether a rule deserves a look: it had an alert, or cannot be evaluated. */
export function isNotable(lane: Lane): boolean {
  return (
    lane.health === "error" ||
    lane.intervals.some((interval) => ["pending", "firing", "resolved", "error"].includes(interval.state))
  );
}

/** Return the parts of a lane that the axis shows, the least severe first, so that short ones are drawn over long ones. */
export function partsOf(lane: Lane, axis: StepAxis, width: number): LanePart[] {
  const parts: LanePart[] = [];
  for (const interval of lane.intervals) {
    const end = interval.last === null ? axis.end : interval.last + 1;
    if (end <= axis.first || interval.first >= axis.end) continue;
    const left = Math.max(0, shareOf(axis, interval.first)) * width;
    const right = Math.min(1, shareOf(axis, end)) * width;
    const range =
      interval.last === null ? `from step ${interval.first}` : `steps ${interval.first}–${interval.last}`;
    parts.push({
      state: interval.state,
      left: Math.min(left, width - LEAST_WIDTH),
      width: Math.max(LEAST_WIDTH, right - left),
      text: `${STATES[interval.state]}, ${range}${interval.message === "" ? "" : `: ${interval.message}`}`,
    });
  }
  const order = Object.keys(STATES);
  const weight = (part: LanePart): number =>
    part.state === "firing" ? order.length : order.indexOf(part.state === "resolved" ? "ok" : part.state);
  return parts.sort((a, b) => weight(a) - weight(b));
}

/** Marks that are too close to each other to be pointed at, drawn as one. */
export interface MarkGroup {
  left: number;
  marks: Mark[];
  /** The one that matters most. */
  main: Mark;
  symbol: "alert" | "stop" | "resolved" | "error" | "attempt" | "other";
}

const SYMBOLS: [RegExp, MarkGroup["symbol"], number][] = [
  [/alert\.firing$/, "alert", 5],
  [/stop\.(requested|would_have)$/, "stop", 4],
  [/rule\.error$/, "error", 3],
  [/attempt\.started$/, "attempt", 2],
  [/alert\.resolved$/, "resolved", 1],
];

function kindOf(mark: Mark): { symbol: MarkGroup["symbol"]; weight: number } {
  for (const [pattern, symbol, weight] of SYMBOLS)
    if (pattern.test(mark.type)) return { symbol, weight: weight + (mark.severity === "critical" ? 0.5 : 0) };
  return { symbol: "other", weight: 0 };
}

/** Group the marks that the axis shows by their place. */
export function groupMarks(
  marks: readonly Mark[],
  stepOf: (mark: Mark) => number | null,
  axis: StepAxis,
  width: number,
  distance = 16,
): MarkGroup[] {
  const placed = marks
    .map((mark) => ({ mark, step: stepOf(mark) }))
    .filter(
      (entry): entry is { mark: Mark; step: number } =>
        entry.step !== null && entry.step >= axis.first && entry.step < axis.end,
    )
    .sort((a, b) => a.step - b.step);
  const groups: MarkGroup[] = [];
  for (const { mark, step } of placed) {
    const left = shareOf(axis, step + 0.5) * width;
    const group = groups.at(-1);
    const { symbol, weight } = kindOf(mark);
    if (group === undefined || left - group.left > distance)
      groups.push({ left, marks: [mark], main: mark, symbol });
    else {
      group.marks.push(mark);
      if (weight > kindOf(group.main).weight) [group.main, group.symbol] = [mark, symbol];
    }
  }
  return groups;
}
