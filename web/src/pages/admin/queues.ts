/** Names of the queues as people read them. */
export const QUEUE_NAMES: Record<string, string> = {
  runs: "Runs to evaluate",
  actions: "Stops, notifications and webhooks",
  backtests: "Backtests",
};

const BEHIND_SECONDS = 10;
const FAR_BEHIND_SECONDS = 60;

/** How far behind a queue is, as a badge: an evaluation is due within ten seconds. */
export function lagTone(oldestSeconds: number): { text: string; tone: "ok" | "warning" | "fault" } {
  if (oldestSeconds < BEHIND_SECONDS) return { text: "up to date", tone: "ok" };
  if (oldestSeconds < FAR_BEHIND_SECONDS) return { text: "behind", tone: "warning" };
  return { text: "far behind", tone: "fault" };
}

/** Return the matchers of a text, one per line or comma: `rule=nan_or_inf`. */
export function matchersOf(text: string): string[] {
  return text
    .split(/[\n,]/)
    .map((matcher) => matcher.trim())
    .filter(Boolean);
}
