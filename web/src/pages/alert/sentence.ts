import type { Schemas } from "../../api/client";

// What fired and what became of the run, in sentences.

type AlertPage = Schemas["AlertPage"];

/** A text of a recorder with at most `most` characters: names may have thousands. */
export function shorten(text: string, most = 120): string {
  if (text.length <= most) return text;
  const end = Math.floor(most / 3);
  return `${text.slice(0, most - end - 1)}…${text.slice(-end)}`;
}

/** What the tensor of a finding is, and the measured value: ` (gradient of module 7, Linear): value 10, threshold 0`. */
export function detailOf(finding: Schemas["AlertFinding"]): string {
  const { module, role, value_text: value, threshold_text: threshold } = finding;
  const type = finding.module_type === "" ? "" : `, ${finding.module_type}`;
  const place = module === "" ? role : `${role || "tensor"} of module ${shorten(module)}${shorten(type)}`;
  const measure = value === "" ? "" : `: value ${value}${threshold === "" ? "" : `, threshold ${threshold}`}`;
  return (finding.tensor === "" || place === "" ? "" : ` (${place})`) + measure;
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
    return `It stopped the run${stop.step === null ? "" : ` at step ${stop.step}`}.`;
  }
  const unchanged = alert.dry_run
    ? "The rule is in a dry run, so it stops nothing and notifies nobody."
    : "This alert stopped nothing.";
  switch (run.state) {
    case "running":
      return `The run goes on, at step ${run.last_step}. ${unchanged}`;
    case "stopped": {
      const other = page.others.find(({ fingerprint }) => fingerprint === stop?.fingerprint);
      const by =
        other === undefined ? (stop?.fingerprint == null ? " by an operator" : "") : ` by ${other.name}`;
      return `The run was stopped${by}${stop?.step == null ? "" : ` at step ${stop.step}`}.`;
    }
    case "completed":
      return `The run completed at step ${run.last_step}. ${unchanged}`;
    case "failed":
      return `The run failed at step ${run.last_step}. ${unchanged}`;
    case "lost":
      return `The run was lost at step ${run.last_step}. ${unchanged}`;
    default:
      return unchanged;
  }
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
