// The state of the page that compares runs, as it is in the address.

export const MOST_RUNS = 8;
export const MOST_TENSORS = 16;
export const DEFAULT_FIGURE = "mean";

export interface ComparisonView {
  /** Names of the runs; the first one is the reference. */
  runs: readonly string[];
  /** Chosen tensors; empty: the losses. */
  tensors: readonly string[];
  figure: string;
  align: "step" | "time";
  /** Shown steps; null: all. */
  from: number | null;
  to: number | null;
  /** Whether the vertical axes are logarithmic; null: where it shows more. */
  logarithmic: boolean | null;
}

/** Read the state from a query string. */
export function viewOf(query: URLSearchParams): ComparisonView {
  const step = (name: string): number | null => {
    const value = Number(query.get(name) ?? "");
    return query.get(name) && Number.isSafeInteger(value) && value >= 0 ? value : null;
  };
  const align = query.get("align") === "time" ? "time" : "step";
  const log = query.get("log");
  return {
    runs: unique((query.get("runs") ?? "").split(",").map((name) => name.trim())).slice(0, MOST_RUNS),
    tensors: unique(query.getAll("tensor")).slice(0, MOST_TENSORS),
    figure: query.get("figure") || DEFAULT_FIGURE,
    align,
    from: align === "step" ? step("from") : null,
    to: align === "step" ? step("to") : null,
    logarithmic: log === null || log === "" ? null : log === "1",
  };
}

/** Write the state as a query string. */
export function queryOf(view: ComparisonView): string {
  const query = new URLSearchParams();
  if (view.runs.length > 0) query.set("runs", view.runs.join(","));
  for (const tensor of view.tensors) query.append("tensor", tensor);
  if (view.figure !== DEFAULT_FIGURE) query.set("figure", view.figure);
  if (view.align === "time") query.set("align", "time");
  if (view.align === "step" && view.from !== null) query.set("from", String(view.from));
  if (view.align === "step" && view.to !== null) query.set("to", String(view.to));
  if (view.logarithmic !== null) query.set("log", view.logarithmic ? "1" : "0");
  return query.toString().replaceAll("%2C", ",");
}

/** The view with another tensor added; with the first one, a size is shown instead of the mean, which says little about a layer. */
export function withTensor(view: ComparisonView, tensor: string): ComparisonView {
  if (view.tensors.includes(tensor) || view.tensors.length >= MOST_TENSORS) return view;
  const figure =
    view.tensors.length === 0 && view.figure === DEFAULT_FIGURE && isOfLayer(tensor) ? "l2" : view.figure;
  return { ...view, tensors: [...view.tensors, tensor], figure };
}

/** Whether a tensor is one of a layer, with many elements, rather than a scalar such as a loss. */
function isOfLayer(tensor: string): boolean {
  return /:(gradient|output|input|update|exp_avg\w*)$|\.(weight|bias)$/.test(tensor);
}

function unique(names: readonly string[]): string[] {
  return [...new Set(names.filter((name) => name !== ""))];
}
