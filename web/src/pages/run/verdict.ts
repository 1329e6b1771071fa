import type { Schemas } from "../../api/client";
import { formatCount } from "../../components/format";

// What happened to a run, in a sentence, and its alerts in the order in which a person should look at them.

type Overview = Schemas["RunOverview"];
type Mark = Schemas["RunMark"];

/** An alert of the run, as far as its events and its lane say. */
export interface RunAlert {
  name: string;
  severity: string;
  phase: string;
  fingerprint: string;
  /** Step from which the run is bad, the first of its findings; null if its event is no longer listed. */
  step: number | null;
  /** Rank of the worker of the finding; null for a finding about the run as a whole. */
  worker: number | null;
  /** Tensor of the finding; empty if there is none. */
  tensor: string;
  /** Earlier tensors in the data flow that were bad at this step, the origin first. */
  causes: readonly string[];
  message: string;
  /** Rule whose alert explains this one; empty if there is none. */
  inhibitedBy: string;
}

export interface Verdict {
  tone: "ok" | "warning" | "fault" | "active" | "quiet";
  /** What happened, without the tensor of the alert. */
  title: string;
  /** Why, in the words of the rule, the operator or the program; may be empty. */
  reason: string;
  /** What became of the request to stop, and other notes. */
  notes: string[];
  /** The alert that stopped the run or that matters most; null if none fired. */
  main: RunAlert | null;
  others: RunAlert[];
}

const SEVERITIES = ["critical", "warning", "info"];
const rank = (severity: string): number => (SEVERITIES.indexOf(severity) + SEVERITIES.length + 1) % 4;
const PHASES = ["firing", "resolved", "pending"];

/** Return the alerts of a run: firing ones first, those that explain others before them, then by severity and step. */
export function alertsOf(overview: Overview): RunAlert[] {
  const fired = new Map<string, Mark>();
  const reported = new Map<string, Mark>();
  for (const mark of overview.marks) {
    if (mark.fingerprint === "" || mark.superseded) continue;
    if (mark.type === "io.watchstep.alert.firing") fired.set(mark.fingerprint, mark);
    // A revised alert has a likelier cause than the one that it fired with.
    if (/alert\.(firing|revised)$/.test(mark.type)) reported.set(mark.fingerprint, mark);
  }
  const alerts = overview.lanes
    .filter((lane) => lane.fingerprint !== "" && PHASES.includes(lane.phase))
    .map((lane): RunAlert => {
      const mark = reported.get(lane.fingerprint);
      const interval = lane.intervals.findLast((entry) => entry.state === "firing");
      return {
        name: lane.name,
        severity: lane.severity,
        phase: lane.phase,
        fingerprint: lane.fingerprint,
        step: badFrom(fired.get(lane.fingerprint)) ?? interval?.first ?? null,
        worker: mark?.worker ?? null,
        tensor: mark?.tensor ?? "",
        causes: mark?.causes ?? [],
        message: withoutPrefix(mark?.title ?? interval?.message ?? "", lane.name),
        inhibitedBy: mark?.inhibited_by ?? "",
      };
    });
  const key = (alert: RunAlert): number[] => [
    PHASES.indexOf(alert.phase),
    alert.inhibitedBy === "" ? 0 : 1,
    rank(alert.severity),
    alert.step ?? Infinity,
  ];
  return alerts.sort((a, b) => compare(key(a), key(b)));
}

const badFrom = (mark: Mark | undefined): number | null => mark?.since_step ?? mark?.step ?? null;

/** How many steps were lost: those from the first bad one to the last. */
export function stepsLost(from: number, last: number): string {
  const lost = Math.max(0, last - from + 1);
  return `${formatCount(lost)} ${lost === 1 ? "step" : "steps"} lost`;
}

function compare(a: readonly number[], b: readonly number[]): number {
  const place = a.findIndex((value, index) => value !== b[index]);
  return place < 0 ? 0 : (a[place] ?? 0) < (b[place] ?? 0) ? -1 : 1;
}

/** Titles of marks begin with the rule's name, which is shown beside the message. */
function withoutPrefix(title: string, name: string): string {
  for (const prefix of [`${name} fires: `, `${name}, likelier cause: `])
    if (title.startsWith(prefix)) return title.slice(prefix.length);
  return title;
}

/** Return what happened to a run. */
export function verdictOf(overview: Overview): Verdict {
  const { run, stop } = overview;
  const alerts = alertsOf(overview);
  const stopping = alerts.find((alert) => alert.fingerprint === stop?.fingerprint);
  // The rule that stopped a run explains its end, even if its alert has been resolved since.
  const main = (run.state === "stopped" ? stopping : undefined) ?? alerts[0] ?? null;
  const others = alerts.filter((alert) => alert !== main);
  const firing = alerts.filter((alert) => alert.phase === "firing");
  const severe = firing.some((alert) => alert.severity === "critical");
  const last = run.last_step >= 0 ? `, ended after step ${run.last_step}` : "";
  const counted = firing.length === 1 ? "one alert fires" : `${firing.length} alerts fire`;
  const notes = stop === null ? [] : notesOf(stop, run);

  const of = (tone: Verdict["tone"], title: string, reason = main?.message ?? ""): Verdict => ({
    tone,
    title,
    reason,
    notes,
    main,
    others,
  });
  switch (run.state) {
    case "stopped": {
      if (stopping !== undefined && stopping.step !== null)
        return of(
          "fault",
          `Bad from step ${stopping.step}${rankOf(stopping, run)}, stopped by ${stopping.name}${last}, ` +
            stepsLost(stopping.step, run.last_step),
        );
      return of("warning", `Stopped${last}`, stop?.reason || run.reason);
    }
    case "failed":
      return of("fault", `Failed${last}`, run.reason || main?.message || "The program gave no reason.");
    case "lost":
      return of(
        "fault",
        `Lost${last}`,
        "Its recorder stopped reporting, and did not say how the program ended.",
      );
    case "completed":
      if (firing.length > 0)
        return of(severe ? "fault" : "warning", `Completed${last}, but ${counted}${since(main, run)}`);
      if (alerts.length > 0) return of("ok", `Completed${last}; every alert was resolved`);
      return of("ok", `Completed${last}, without an alert`);
    case "created":
      return of(
        "quiet",
        "Registered, no data yet",
        "The page shows the first steps as soon as they are recorded.",
      );
    default: {
      const where = run.last_step >= 0 ? `Running, step ${run.last_step}` : "Running, no step yet";
      if (firing.length > 0) return of(severe ? "fault" : "warning", `${where}: ${counted}`);
      return of("active", `${where}: ${alerts.length > 0 ? "every alert was resolved" : "no alert"}`);
    }
  }
}

/** The step from which the main alert fires, and its rank, in words: `: nan_or_inf, bad from step 120 on rank 1`. */
function since(main: RunAlert | null, run: Overview["run"]): string {
  if (main?.phase !== "firing" || main.step === null) return "";
  return `: ${main.name}, bad from step ${main.step}${rankOf(main, run)}`;
}

function notesOf(stop: Schemas["StopFacts"], run: Schemas["RunFacts"]): string[] {
  const result = stop.outcome === "" ? "" : `: ${stop.outcome}`;
  if (stop.state === "pending") return [`A stop was requested and is being carried out${result}.`];
  if (stop.state === "failed") return [`The stop failed${result}.`];
  if (stop.state === "skipped") return [`A stop was requested, but had no effect${result}.`];
  return run.state !== "stopped" && stop.state === "done" ? [`A stop was requested${result}.`] : [];
}

/** The rank of the worker that an alert is about, if there are several: ` on rank 1`. */
export function rankOf(
  { worker }: Pick<RunAlert, "worker">,
  { workers }: Pick<Overview["run"], "workers">,
): string {
  return workers > 1 && worker !== null ? ` on rank ${worker}` : "";
}
