import type { Schemas } from "../../api/client";

type Headroom = Schemas["HeadroomOutput"];
type State = Schemas["FormatHeadroomOutput"]["state"];

/** What a state of a tensor in a number format means, the worst first. */
export const STATES: Record<State, { name: string; tone: "fault" | "warning" | "quiet" | "ok" }> = {
  overflow: { name: "overflows", tone: "fault" },
  close: { name: "less than 1 bit to overflow", tone: "warning" },
  underflow: { name: "smallest become zero", tone: "warning" },
  subnormal: { name: "smallest lose precision", tone: "quiet" },
  ok: { name: "fits", tone: "ok" },
};
const ORDER = Object.keys(STATES) as State[];

/** Return how many tensors are in each state of each format. */
export function countStates(headroom: Headroom): Record<string, Record<State, number>> {
  const counts: Record<string, Record<State, number>> = {};
  for (const format of headroom.formats)
    counts[format.name] = { overflow: 0, close: 0, underflow: 0, subnormal: 0, ok: 0 };
  for (const tensor of headroom.tensors)
    for (const entry of tensor.formats) {
      const states = counts[entry.format];
      if (states) states[entry.state] += 1;
    }
  return counts;
}

/** A tensor in a format, for the table. */
export interface FormatRow {
  tensor: string;
  state: State;
  largest: number | null;
  largestStep: number | null;
  overflowBits: number | null;
  underflowBits: number | null;
}

/** Return the tensors of a format, those in the worst state first, and of equal ones those with the fewest bits left. */
export function rowsOf(headroom: Headroom, format: string): FormatRow[] {
  const rows = headroom.tensors.flatMap((tensor): FormatRow[] => {
    const entry = tensor.formats.find((candidate) => candidate.format === format);
    if (entry === undefined) return [];
    return [
      {
        tensor: tensor.tensor,
        state: entry.state,
        largest: tensor.largest,
        largestStep: tensor.largest_step,
        overflowBits: entry.overflow_bits,
        underflowBits: entry.underflow_bits,
      },
    ];
  });
  const bits = (row: FormatRow): number =>
    row.state === "underflow" || row.state === "subnormal"
      ? (row.underflowBits ?? Infinity)
      : (row.overflowBits ?? Infinity);
  return rows.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || bits(a) - bits(b) || 0);
}

/** Return the format to show first: fp16, unless another one has tensors that overflow or are close to it. */
export function usualFormat(headroom: Headroom): string {
  const counts = countStates(headroom);
  const trouble = headroom.formats.find(
    ({ name }) => (counts[name]?.overflow ?? 0) + (counts[name]?.close ?? 0) > 0,
  );
  return trouble?.name ?? headroom.formats[0]?.name ?? "";
}
