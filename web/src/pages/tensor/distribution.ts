import type { Schemas } from "../../api/client";

// The distribution of a tensor over the steps: its rows are records, its bins are signed powers of two.

type Histogram = Schemas["HistogramOutput"];

/** A row of the histogram that has records. */
export interface Record {
  row: number;
  /** First and last measured step. */
  first: number;
  last: number;
  /** Number of elements, with zeros and those that are not finite. */
  total: number;
}

/** Return the rows with a record; steps without one have no elements. */
export function recordsOf(histogram: Histogram): Record[] {
  return histogram.zeros.flatMap((zeros, row) => {
    const finite = histogram.counts[row]?.reduce((sum, count) => sum + count, 0) ?? 0;
    const total = finite + zeros + (histogram.nonfinite[row] ?? 0);
    return total > 0 ? [{ row, first: histogram.first[row]!, last: histogram.last[row]!, total }] : [];
  });
}

/** Return the place in the list of the record that a step shows: the newest one that began by then, else the first. */
export function recordAt(records: readonly Record[], step: number | null): number {
  if (records.length === 0) return -1;
  if (step === null) return records.length - 1;
  return Math.max(
    0,
    records.findLastIndex((record) => record.first <= step),
  );
}

/** Name the steps of a record. */
export function nameOf(record: Record): string {
  return record.first === record.last ? `step ${record.first}` : `steps ${record.first}–${record.last}`;
}

/** The columns of bins: those of negative elements come first, from the most negative on, then those of positive ones. */
export function negativeBins(histogram: { upper: readonly (number | null)[] }): number {
  return histogram.upper.filter((upper) => upper !== null && upper <= 0).length;
}

/** Shares of a record's elements: per bin, zero, and not finite. */
export interface Shares {
  bins: number[];
  zero: number;
  nonfinite: number;
}

/** Return the shares of a record's elements. */
export function sharesOf(histogram: Histogram, record: Record): Shares {
  return {
    bins: (histogram.counts[record.row] ?? []).map((count) => count / record.total),
    zero: (histogram.zeros[record.row] ?? 0) / record.total,
    nonfinite: (histogram.nonfinite[record.row] ?? 0) / record.total,
  };
}

/** Return at most `most` records, evenly chosen, with the first and the last one, and always the one at `place`. */
export function thinned(records: readonly Record[], most: number, place: number): number[] {
  if (records.length <= most) return records.map((_, index) => index);
  const chosen = new Set<number>([place]);
  for (let index = 0; index < most - 1; index += 1)
    chosen.add(Math.round((index * (records.length - 1)) / (most - 2)));
  return [...chosen].filter((index) => index >= 0).sort((a, b) => a - b);
}

/** Return the place of the record of each row; −1 for a row that was not measured. */
export function placesOfRows(histogram: Histogram, records: readonly Record[]): Int32Array {
  const places = new Int32Array(histogram.zeros.length).fill(-1);
  records.forEach((record, index) => (places[record.row] = index));
  return places;
}

/** Return the place of the record that is nearest to a row; the earlier of two, and −1 if there are no records. */
export function nearestPlace(placeOf: Int32Array, row: number): number {
  for (let away = 0; away < placeOf.length; away += 1) {
    const earlier = placeOf[row - away] ?? -1;
    if (earlier >= 0) return earlier;
    const later = placeOf[row + away] ?? -1;
    if (later >= 0) return later;
  }
  return -1;
}

/** Bins to label on an axis, at most `most`, evenly from the outer end of each sign. */
export function labelledBins(bins: number, negative: number, most: number): number[] {
  const every = Math.max(1, Math.ceil(bins / Math.max(1, most)));
  const labels: number[] = [];
  for (let bin = 0; bin < negative; bin += every) labels.push(bin);
  for (let bin = bins - 1; bin >= negative; bin -= every) labels.push(bin);
  return labels;
}

/** A power of two in few characters: `0.125`, `1e−7`. */
export function boundText(value: number | null): string {
  if (value === null) return "";
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 0.001 || size >= 10000)
      ? size.toExponential(0)
      : String(Number(size.toPrecision(2)));
  return (value < 0 ? "−" : "") + text.replace("e+", "e").replace("e-", "e−");
}

/**
 * Whose elements a distribution shows, if it is not those of all workers that measured the tensor; empty if it is.
 *
 * @param workers workers that measured it
 * @param choice the choice of workers: `merged`, `separate`, or the number of one
 */
export function whoseElements(workers: readonly number[], choice: string): string {
  if (workers.length < 2) return "";
  return /^\d+$/.test(choice)
    ? `Of worker ${choice}.`
    : "Of the first replica only. Choose one worker above to see its distribution.";
}
