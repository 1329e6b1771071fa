import type { Schemas } from "../../api/client";

type Run = Schemas["RunFacts"];

/** States of a run, in the order of the filter. */
export const STATES = ["running", "completed", "stopped", "failed", "lost", "created"] as const;
export type State = (typeof STATES)[number];

/** Columns that the service sorts by. */
export const SORTS = ["created", "name", "state", "step", "ended", "seen", "firing"] as const;
export type Sort = (typeof SORTS)[number];

/** Runs in a page of the table. */
export const PAGE_SIZE = 50;

/** What the address selects; the names of its parameters are those of the API. */
export interface Filters {
  search: string;
  state: State[];
  tag: string[];
  firing: boolean;
  sort: Sort;
  order: "ascending" | "descending";
  offset: number;
}

/** Return the filters of an address; unknown values are ignored. */
export function filtersOf(query: URLSearchParams): Filters {
  const words = (name: string): string[] => (query.get(name) ?? "").split(",").filter(Boolean);
  const sort = SORTS.find((name) => name === query.get("sort")) ?? "created";
  const offset = Number(query.get("offset") ?? 0);
  return {
    search: query.get("search") ?? "",
    state: STATES.filter((state) => words("state").includes(state)),
    tag: words("tag"),
    firing: query.get("firing") === "1",
    sort,
    order: query.get("order") === "ascending" ? "ascending" : "descending",
    offset: Number.isInteger(offset) && offset > 0 ? offset : 0,
  };
}

/** Whether the filters leave any run out. */
export function filtered(filters: Filters): boolean {
  return filters.search !== "" || filters.state.length > 0 || filters.tag.length > 0 || filters.firing;
}

/** Return the share of a run's steps that are done; null if the number of its steps is not known. */
export function progressOf(run: Pick<Run, "last_step" | "max_step">): number | null {
  if (run.max_step === null || run.max_step <= 0) return null;
  return Math.min(1, Math.max(0, (run.last_step + 1) / run.max_step));
}

/** Return a selection with a run added or removed; at most `most` runs can be compared. */
export function toggled(selection: readonly string[], run: string, most = 8): string[] {
  if (selection.includes(run)) return selection.filter((name) => name !== run);
  return selection.length < most ? [...selection, run] : [...selection];
}
