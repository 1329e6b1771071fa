import type { PlaceRange } from "./paint";

// Zoom and pan over the operations. Ranges stay within 0 and the number of operations, and show at least a few.

const LEAST = 8;

/** Return a range of a length around a start, moved and cut so that it is valid. */
export function limited(from: number, length: number, count: number): PlaceRange {
  const all = Math.max(1, count);
  const size = Math.min(all, Math.max(Math.min(LEAST, all), length));
  const start = Math.min(all - size, Math.max(0, from));
  return [start, start + size];
}

/** Zoom by a factor (above 1: closer) so that the place at a share of the width stays where it is. */
export function zoomed(range: PlaceRange, factor: number, share: number, count: number): PlaceRange {
  const length = range[1] - range[0];
  const size = limited(0, length / factor, count)[1];
  return limited(range[0] + share * (length - size), size, count);
}

/** Move by a number of places. */
export function panned(range: PlaceRange, places: number, count: number): PlaceRange {
  return limited(range[0] + places, range[1] - range[0], count);
}

/** Return the range, moved if a place is outside of it or at its very edge. */
export function including(range: PlaceRange, place: number, count: number): PlaceRange {
  const length = range[1] - range[0];
  const margin = Math.min(length / 10, 4);
  if (place >= range[0] + margin && place + 1 <= range[1] - margin) return range;
  if (range[0] === 0 && place < range[1] - margin) return range;
  if (range[1] === count && place >= range[0] + margin) return range;
  return limited(place - length / 2, length, count);
}

/** Return the range of the address' parameters; all operations if they are missing. */
export function rangeOf(from: number | null, to: number | null, count: number): PlaceRange {
  if (from === null && to === null) return limited(0, count, count);
  const start = from ?? 0;
  return limited(start, (to ?? count) - start, count);
}
