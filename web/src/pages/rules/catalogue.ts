import type { Schemas } from "../../api/client";

type Rule = Schemas["RuleSummary"];

// Search in the rules by name or by symptom, in the words of people who see the symptom.

/** Words that people use, and the words of rules that they mean. */
const SYNONYMS: Record<string, string[]> = {
  nan: ["nan", "infinity", "finite"],
  inf: ["infinity", "nan"],
  diverge: ["explod", "spike", "diverge", "rises"],
  diverges: ["explod", "spike", "diverge"],
  stuck: ["not_decreasing", "vanish", "saturat", "updat", "flat"],
  plateau: ["not_decreasing", "slow_convergence"],
  slow: ["slow", "bottleneck", "stalled", "converge"],
  hang: ["stalled"],
  hangs: ["stalled"],
  frozen: ["frozen", "unchanged", "updat", "optimizer"],
  dead: ["dead", "zero"],
  memory: ["memory"],
  oom: ["memory"],
  fp16: ["float16", "half", "precision", "scaler", "headroom"],
  bf16: ["precision", "headroom", "bfloat16"],
  overfitting: ["overfit", "validation"],
  generalization: ["overfit", "validation"],
  noisy: ["oscillat", "spike"],
  jumps: ["jump", "spike"],
  gpu: ["gpu", "utilization"],
  lr: ["learning rate", "learning_rate", "hyperparameter"],
};

/** A found rule, with why it was found. */
export interface Match {
  rule: Rule;
  /** The usual cause that contains the words; empty if the name or the summary does. */
  cause: string;
}

/** Return the rules that contain all words, best first: by name, then by summary, then by cause. Without words, all of them. */
export function searchRules(rules: readonly Rule[], text: string): Match[] {
  const words = text.toLowerCase().replaceAll("_", " ").split(/\s+/).filter(Boolean);
  const scored = rules.flatMap((rule) => {
    const [name, summary] = [rule.name.toLowerCase().replaceAll("_", " "), rule.summary.toLowerCase()];
    const causes = rule.usual_causes.map((cause) => cause.toLowerCase());
    let score = rule.group === "sagemaker" ? -1 : 0;
    let cause = "";
    for (const word of words) {
      const forms = [word, ...(SYNONYMS[word] ?? []).map((form) => form.replaceAll("_", " "))];
      const inName = forms.some((form) => name.includes(form));
      const inSummary = forms.some((form) => summary.includes(form));
      const place = causes.findIndex((line) => forms.some((form) => line.includes(form)));
      if (!inName && !inSummary && place < 0 && !rule.group.includes(word)) return [];
      score += inName ? 8 : inSummary ? 4 : 2;
      if (name.includes(word)) score += 2;
      if (!inName && !inSummary && place >= 0) cause = rule.usual_causes[place] ?? "";
    }
    return [{ match: { rule, cause }, score }];
  });
  scored.sort((a, b) => b.score - a.score || a.match.rule.name.localeCompare(b.match.rule.name));
  return scored.map(({ match }) => match);
}

/** Return a name for a new rule config that no other has. */
export function freeName(rule: string, taken: readonly string[]): string {
  if (!taken.includes(rule)) return rule;
  let number = 2;
  while (taken.includes(`${rule}_${number}`)) number += 1;
  return `${rule}_${number}`;
}
