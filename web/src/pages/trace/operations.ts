import type { Schemas } from "../../api/client";

// All operations of a trace, in columns. A place is a position in these columns; an index identifies an operation in the API.

/** Operations in the order in which they ran. Columns have `count` entries. */
export interface Operations {
  readonly count: number;
  /** Index of each operation, ascending. */
  readonly index: Float64Array;
  readonly step: Float64Array;
  /** Places of texts in the lists below; −1: too many distinct ones. */
  readonly name: Int16Array;
  readonly node: Int16Array;
  readonly module: Int16Array;
  readonly phase: Int16Array;
  /** 1 where an output is not finite. */
  readonly bad: Uint8Array;
  /** Places of the bad ones, ascending. */
  readonly badPlaces: readonly number[];
  readonly names: readonly string[];
  readonly nodes: readonly string[];
  readonly modules: readonly string[];
  readonly phases: readonly string[];
  /** First place of each run of operations of one step, ascending. */
  readonly boundaries: readonly number[];
}

/** Return the operations of a timeline document. */
export function operationsOf(timeline: Schemas["TraceTimeline"]): Operations {
  const count = timeline.index.length;
  const bad = new Uint8Array(count);
  for (const place of timeline.bad) bad[place] = 1;
  const step = Float64Array.from(timeline.step);
  const boundaries: number[] = [];
  for (let place = 0; place < count; place += 1)
    if (place === 0 || step[place] !== step[place - 1]) boundaries.push(place);
  return {
    count,
    index: Float64Array.from(timeline.index),
    step,
    name: Int16Array.from(timeline.name),
    node: Int16Array.from(timeline.node),
    module: Int16Array.from(timeline.module),
    phase: Int16Array.from(timeline.phase),
    bad,
    badPlaces: timeline.bad,
    names: timeline.names,
    nodes: timeline.nodes,
    modules: timeline.modules,
    phases: timeline.phases,
    boundaries,
  };
}

/** Return the place of the operation with an index; null if the trace does not have it. */
export function placeOf(operations: Operations, index: number): number | null {
  let [low, high] = [0, operations.count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (operations.index[middle]! < index) low = middle + 1;
    else high = middle;
  }
  return low < operations.count && operations.index[low] === index ? low : null;
}

/** What `matchesOf` selects; empty texts and null select all. */
export interface Filter {
  /** Part of a name, or of the name of a node; upper and lower case are the same. */
  text: string;
  /** Path of a module; those in it are selected too. */
  module: string;
  phase: string;
  step: number | null;
  badOnly: boolean;
}

/** The selected operations. */
export interface Matches {
  /** 1 for each selected operation; null if all are. */
  readonly mask: Uint8Array | null;
  readonly count: number;
}

/** Return the operations that a filter selects. Texts are compared once each, not once per operation. */
export function matchesOf(operations: Operations, filter: Filter): Matches {
  const text = filter.text.trim().toLowerCase();
  if (text === "" && filter.module === "" && filter.phase === "" && filter.step === null && !filter.badOnly)
    return { mask: null, count: operations.count };
  const contains = (candidate: string): boolean => candidate.toLowerCase().includes(text);
  const isInside = (path: string): boolean =>
    filter.module === "" || path === filter.module || path.startsWith(`${filter.module}.`);
  const names = operations.names.map(contains);
  const nodes = operations.nodes.map(contains);
  const modules = operations.modules.map(isInside);
  const phases = operations.phases.map((phase) => filter.phase === "" || phase === filter.phase);
  const mask = new Uint8Array(operations.count);
  let count = 0;
  for (let place = 0; place < operations.count; place += 1) {
    const selected =
      (text === "" || names[operations.name[place]!] === true || nodes[operations.node[place]!] === true) &&
      (filter.module === "" || modules[operations.module[place]!] === true) &&
      phases[operations.phase[place]!] === true &&
      (filter.step === null || operations.step[place] === filter.step) &&
      (!filter.badOnly || operations.bad[place] === 1);
    if (!selected) continue;
    mask[place] = 1;
    count += 1;
  }
  return { mask, count };
}

/** Return the next selected place in a direction from a place; null if there is none. */
export function nextMatch(
  operations: Operations,
  { mask }: Matches,
  place: number,
  direction: 1 | -1,
): number | null {
  for (let next = place + direction; next >= 0 && next < operations.count; next += direction)
    if (mask === null || mask[next] === 1) return next;
  return null;
}

/** Return the next bad place in a direction; null if there is none. */
export function nextBad(operations: Operations, place: number, direction: 1 | -1): number | null {
  const places = operations.badPlaces;
  let [low, high] = [0, places.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle]! < place + (direction > 0 ? 1 : 0)) low = middle + 1;
    else high = middle;
  }
  return places[direction > 0 ? low : low - 1] ?? null;
}

/** Return at most `length` selected places around a place, and how many are before and after them. */
export function windowOf(
  operations: Operations,
  { mask, count }: Matches,
  around: number,
  length: number,
): { places: number[]; before: number; after: number } {
  if (mask === null) {
    const first = Math.max(0, Math.min(around - Math.floor(length / 2), count - length));
    const places = Array.from({ length: Math.min(length, count) }, (_, entry) => first + entry);
    return { places, before: first, after: count - first - places.length };
  }
  let rank = 0; // number of selected operations before `around`
  for (let place = 0; place < around; place += 1) rank += mask[place]!;
  const first = Math.max(0, Math.min(rank - Math.floor(length / 2), count - length));
  const places: number[] = [];
  let seen = 0;
  for (let place = 0; place < operations.count && places.length < length; place += 1) {
    if (mask[place] !== 1) continue;
    if (seen >= first) places.push(place);
    seen += 1;
  }
  return { places, before: first, after: count - first - places.length };
}

/** Text of an operation in a column; `…` if the trace has too many distinct ones. */
export function textAt(texts: readonly string[], number: number | undefined): string {
  return number === undefined || number < 0 ? "…" : (texts[number] ?? "");
}
