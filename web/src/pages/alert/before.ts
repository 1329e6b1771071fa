import type { Schemas } from "../../api/client";
import { formatDuration } from "../../components/format";

// What happened before an alert, in the order of time.

type PriorEvent = Schemas["PriorEvent"];

const SHAPES: Record<PriorEvent["kind"], readonly [shape: string, name: string]> = {
  event: ["○", "event"],
  alert: ["▲", "alert"],
  hyperparameter: ["◆", "hyperparameter"],
  attempt: ["▶", "start"],
  checkpoint: ["■", "checkpoint"],
};

/** Shape and name of a kind of event. */
export const shapeOf = (kind: PriorEvent["kind"]): readonly [shape: string, name: string] => SHAPES[kind];

/** Return the events, newest first. Those without a time come last. */
export function newestFirst(events: readonly PriorEvent[]): PriorEvent[] {
  const key = (event: PriorEvent): number => event.at_ns ?? -Infinity;
  return [...events].sort((a, b) => (key(a) === key(b) ? (b.step ?? -1) - (a.step ?? -1) : key(b) - key(a)));
}

/** How long before the alert an event was: in steps, otherwise in time. */
export function distanceOf(event: PriorEvent, step: number, fired: number): string {
  if (event.step !== null) {
    const steps = step - event.step;
    if (steps === 0) return "same step";
    if (steps > 0) return `${steps} ${steps === 1 ? "step" : "steps"} before`;
  }
  if (event.at_ns === null) return "";
  const age = fired - event.at_ns;
  return age < 0 ? `${formatDuration(-age)} after` : `${formatDuration(age)} before`;
}
