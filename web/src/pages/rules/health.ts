import type { Schemas } from "../../api/client";

type Counts = Schemas["HealthCounts"];

/** Health of a rule config over several runs in a few words. */
export function healthText(counts: Counts): string {
  const parts = [
    ...(counts.error > 0 ? [`error on ${counts.error}`] : []),
    ...(counts.ok > 0 ? [`ok on ${counts.ok}`] : []),
    ...(counts.no_data > 0 ? [`no data on ${counts.no_data}`] : []),
  ];
  return parts.join(", ") || "no run yet";
}

/** Tone of it: an error anywhere, else whether it was evaluated at all. */
export function healthTone(counts: Counts): "ok" | "fault" | "quiet" {
  if (counts.error > 0) return "fault";
  return counts.ok > 0 ? "ok" : "quiet";
}

/** Tone of a severity. */
export function severityTone(severity: string): "fault" | "warning" | "quiet" {
  return severity === "critical" ? "fault" : severity === "warning" ? "warning" : "quiet";
}
