import type { Schemas } from "../api/client";
import { formatShare } from "./format";

type Tone = "ok" | "warning" | "fault" | "active" | "quiet";

const RUN_TONES: Record<string, Tone> = {
  created: "quiet",
  running: "active",
  completed: "ok",
  failed: "fault",
  stopped: "warning",
  lost: "fault",
};
const ALERT_TONES: Record<string, Tone> = { pending: "warning", firing: "fault", resolved: "ok" };
const HEALTH_TONES: Record<string, Tone> = { ok: "ok", warning: "warning", fault: "fault", unknown: "quiet" };

/** Tone of a run's state for `badge.svelte`. */
export const runTone = (state: string): Tone => RUN_TONES[state] ?? "quiet";
/** Tone of an alert's phase. */
export const alertTone = (phase: string): Tone => ALERT_TONES[phase] ?? "quiet";
/** Tone of a health level. */
export const healthTone = (level: string): Tone => HEALTH_TONES[level] ?? "quiet";

type Overhead = Schemas["Overhead"];
const FIRST_STEPS = 200; // they are measured beyond the budget

/** The cost of recording in words: `1.8 % of the program's time, 0.9 % in the last minutes, budget 1 %`. */
export function overheadText({ share, recent_share: recent, budget }: Overhead): string {
  const isSame = recent === null || formatShare(recent) === formatShare(share);
  const minutes = isSame ? "" : `, ${formatShare(recent)} in the last minutes`;
  return `${formatShare(share)} of the program's time${minutes}${budget === null ? "" : `, budget ${formatShare(budget)}`}`;
}

/** Whether recording costs more than its budget, after the first steps: in the last minutes, or since the start if they are not known. */
export function exceedsBudget(overhead: Overhead | null | undefined): boolean {
  if (overhead == null || overhead.budget === null || (overhead.steps ?? 0) <= FIRST_STEPS) return false;
  return (overhead.recent_share ?? overhead.share) > overhead.budget;
}
