import type { RunAlert } from "./verdict";

/** Statistics to choose from, by what they say; the key is the name in the API. */
export const FIGURES: Record<string, Record<string, string>> = {
  Size: {
    l2: "L2 norm",
    rms: "root mean square",
    abs_mean: "mean magnitude",
    abs_max: "largest magnitude",
    abs_min: "smallest magnitude, not zero",
    l1: "L1 norm",
  },
  Distribution: { mean: "mean", std: "standard deviation", min: "smallest", max: "largest" },
  Shares: { zero_share: "share of zeros", nonfinite_share: "share of NaN and infinite" },
  "Probes, where recorded": {
    update_ratio: "update / weight ratio",
    gradient_cosine: "cosine to the previous gradient",
  },
  Counts: {
    count: "elements",
    nan: "NaN",
    pos_inf: "infinite, positive",
    neg_inf: "infinite, negative",
    zero: "zeros",
  },
};

/** Collections that show most, in this order. */
const PREFERRED = ["gradients", "activations", "weights", "updates", "biases", "outputs", "inputs"];

/** Return the collection that is shown first: the one of the main alert if its tensor says so, else the first that is recorded. */
export function defaultCollection(
  collections: Readonly<Record<string, number>>,
  alerts: readonly Pick<RunAlert, "tensor">[],
): string {
  const tensor = alerts[0]?.tensor ?? "";
  if (tensor.endsWith(":output") && "activations" in collections) return "activations";
  return PREFERRED.find((name) => name in collections) ?? Object.keys(collections).sort()[0] ?? "";
}

/** What a heatmap shows. */
export interface HeatmapChoice {
  collection: string;
  figure: string;
  mode: string;
  reduction: string;
  /** First and last step; null for all. */
  from: number | null;
  to: number | null;
  points: number;
  /** The only rank; null for all. */
  worker: number | null;
}

/** Return the address of a heatmap, without its format. */
export function pathOfHeatmap(project: string, run: string, choice: HeatmapChoice): string {
  const query = new URLSearchParams({
    collection: choice.collection,
    figure: choice.figure,
    mode: choice.mode,
    reduce: choice.reduction,
    points: String(choice.points),
    rows: "1000",
  });
  if (choice.from !== null) query.set("first", String(choice.from));
  if (choice.to !== null) query.set("last", String(choice.to));
  if (choice.worker !== null) query.set("worker", String(choice.worker));
  return `/v1/projects/${encodeURIComponent(project)}/runs/${encodeURIComponent(run)}/heatmap?${query}`;
}

/** Return the modules that the reader opened or closed, from the address: names separated by commas, each percent-encoded. */
export function togglesOf(text: string): ReadonlySet<string> {
  return new Set(text.split(",").filter(Boolean).map(decode));
}

/** Return the address's text after another toggle. */
export function withToggle(toggles: ReadonlySet<string>, path: string): string {
  const changed = new Set(toggles);
  if (!changed.delete(path)) changed.add(path);
  return [...changed].map(encodeURIComponent).join(",");
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
