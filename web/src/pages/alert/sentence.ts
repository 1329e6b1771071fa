import type { Schemas } from "../../api/client";
import { stepsLost } from "../run/verdict";
import { rankTensors } from "./layers";

// What fired and what became of the run, in sentences.

type AlertPage = Schemas["AlertPage"];

/** A text of a recorder with at most `most` characters: names may have thousands. */
export function shorten(text: string, most = 120): string {
  if (text.length <= most) return text;
  const end = Math.floor(most / 3);
  return `${text.slice(0, most - end - 1)}…${text.slice(-end)}`;
}

const MOST = 400;

/** What happened, in one sentence: `Bad from step 253 on rank 1: 10 NaN among 10 elements of fc.bias:gradient.` */
export function headlineOf(page: AlertPage): string {
  const { finding, run } = page;
  const rank = run.workers > 1 && finding.tensor !== "" ? ` on rank ${finding.worker}` : "";
  const message = shorten(finding.message, MOST);
  // A rule that waits for several findings describes the last of them.
  const at = finding.step > badFrom(page) ? `at step ${finding.step}: ` : "";
  return `Bad from step ${badFrom(page)}${rank}: ${at}${message}${/[.!?]$/.test(message) ? "" : "."}`;
}

/**
 * Which tensor of another rank is the first with NaN or infinity, in one sentence; empty if there is none. Gradients are averaged over the ranks, and recorded on one of
 * them, which need not be the rank whose data were bad.
 */
export function otherRankOf(page: AlertPage): string {
  const { finding, run } = page;
  const first = rankTensors(page)[0];
  if (run.workers < 2 || first?.deviation?.statistic !== "nonfinite_share") return "";
  if (first.worker === finding.worker || first.step > finding.step) return "";
  return `In the order of the computation, ${shorten(first.tensor)} of rank ${first.worker} is the first with NaN or infinity.`;
}

/** The step from which the run is bad: the first of the findings that made the alert fire. */
export const badFrom = ({ alert, finding }: AlertPage): number => alert.since_step ?? finding.step;

/** What the tensor of a finding is: `gradient of module 7, Linear`; empty if it is not known. */
export function roleOf({ tensor, module, role, module_type: type }: Schemas["AlertFinding"]): string {
  if (tensor === "" || module === "") return role;
  return `${role || "tensor"} of module ${shorten(module)}${type === "" ? "" : `, ${shorten(type)}`}`;
}

/** Whether the alert still fires, and if not, since when. */
export function phaseSentence({ alert, run }: AlertPage): string {
  if (alert.phase === "resolved") {
    const why = /: (the program loaded weights .*)$/.exec(alert.explanation?.title ?? "")?.[1];
    return `It was resolved at step ${alert.step}${why === undefined ? "" : `: ${why}`}.`;
  }
  if (alert.phase !== "firing") return `It is ${alert.phase}.`;
  return ["running", "created"].includes(run.state) ? "It still fires." : "It fired until the run ended.";
}

/** What became of the run. */
export function outcomeSentence(page: AlertPage): string {
  const { alert, run, stop } = page;
  if (stop !== null && stop.fingerprint === alert.fingerprint) {
    const because = stop.outcome === "" ? "" : `: ${stop.outcome}`;
    if (stop.state === "pending") return `It requested a stop, which is being carried out${because}.`;
    if (stop.state === "failed") return `It requested a stop, which failed${because}.`;
    if (stop.state === "skipped") return `It requested a stop, which had no effect${because}.`;
    if (run.state === "running" || run.state === "created")
      return `It requested a stop${because}. The run goes on, at step ${run.last_step}.`;
    if (run.state !== "stopped") {
      const end = run.state === "lost" ? "was lost" : run.state;
      return `It requested a stop${because}. The run was not stopped by it: it ${end}, and ${ended(page)}.`;
    }
    return `The alert stopped the run; it ${ended(page)}.`;
  }
  const unchanged = alert.dry_run
    ? "The rule is in a dry run, so it stops nothing and notifies nobody."
    : "This alert stopped nothing.";
  switch (run.state) {
    case "running":
      return `The run goes on, at step ${run.last_step}. ${unchanged}`;
    case "stopped": {
      // No stop was requested: the gate policy or a guard in the process ended the training before an update.
      if (stop === null) return `The recorder stopped the run before the update of step ${run.last_step}.`;
      const other = page.others.find(({ fingerprint }) => fingerprint === stop?.fingerprint);
      const by =
        other === undefined ? (stop?.fingerprint == null ? " by an operator" : "") : ` by ${other.name}`;
      return `The run was stopped${by}; it ${ended(page)}.`;
    }
    case "completed":
      return `The run completed; it ${ended(page)}. ${unchanged}`;
    case "failed":
      return `The run failed; it ${ended(page)}. ${unchanged}`;
    case "lost":
      return `The run was lost; it ${ended(page)}. ${unchanged}`;
    default:
      return unchanged;
  }
}

/** When the run ended, and what that cost. An alert that was resolved cost nothing after that, and whether steps of a run that completed are lost is not known. */
function ended(page: AlertPage): string {
  const { alert, run } = page;
  const isLost = alert.phase !== "resolved" && run.state !== "completed";
  const lost = isLost ? `, ${stepsLost(badFrom(page), run.last_step)}` : "";
  return `ended after step ${run.last_step}${lost}`;
}

/** The tensors that a person should look at, the first bad one in the data flow first; without the finding's own. */
export function suspectsOf(finding: Schemas["AlertFinding"]): string[] {
  const names = [...finding.upstream, finding.origin].filter(
    (name) => name !== "" && name !== finding.tensor,
  );
  return [...new Set(names)];
}

/** Why an alert has no actions, or why they were not executed. */
export function inactionOf(page: AlertPage): string {
  const { alert, rule, silence } = page;
  if (alert.dry_run) return "None: the rule is in a dry run.";
  if (alert.inhibited_by !== "")
    return `None: ${alert.inhibited_by} explains this alert, and its actions count for both.`;
  if (silence !== null) return "None: the alert is silenced.";
  const configured = rule.config.actions;
  return Array.isArray(configured) && configured.length > 0
    ? "None is stored yet. They are executed within seconds of the alert."
    : "None: the rule neither stops the run nor has receivers of its own.";
}
