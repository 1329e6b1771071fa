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
