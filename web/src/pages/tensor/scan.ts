// One pass over all elements of a saved tensor, part by part: a histogram, and the elements that a person should look at.

/** An element with its place in row-major order. */
export interface PlacedElement {
  place: number;
  value: number;
}

/** Bars of a histogram; `counts[i]` elements are between `edges[i]` and `edges[i + 1]`. */
export interface LinearHistogram {
  edges: number[];
  counts: number[];
}

const WORST = 20;
const BARS = 60;
const SMALLEST_POWER = -1075; // below the subnormal numbers of float64
const POWERS = 2100;

/** Histogram by powers of two, and by equal widths if the least and largest value are given, and the worst elements. */
export class TensorScan {
  scanned = 0;
  zeros = 0;
  nonfinite = 0;
  readonly #negative = new Float64Array(POWERS);
  readonly #positive = new Float64Array(POWERS);
  readonly #linear: Float64Array;
  readonly #notFinite: PlacedElement[] = [];
  #largest: PlacedElement[] = [];
  #limit = 0; // magnitudes up to this one are not among the largest

  constructor(
    readonly low: number | null,
    readonly high: number | null,
  ) {
    this.#linear = new Float64Array(low === null || high === null ? 0 : low === high ? 1 : BARS);
  }

  /** Add the elements that follow those that were added before. */
  add(values: ArrayLike<number>): void {
    const [low, high] = [this.low ?? 0, this.high ?? 0];
    const bars = this.#linear.length;
    const perBar = high > low ? bars / (high - low) : 0;
    for (let index = 0; index < values.length; index += 1) {
      const value = values[index]!;
      if (!Number.isFinite(value)) {
        this.nonfinite += 1;
        if (this.#notFinite.length < WORST) this.#notFinite.push({ place: this.scanned + index, value });
        continue;
      }
      if (bars > 0) this.#linear[Math.min(bars - 1, Math.max(0, Math.floor((value - low) * perBar)))]! += 1;
      if (value === 0) {
        this.zeros += 1;
        continue;
      }
      const size = Math.abs(value);
      const power = Math.floor(Math.log2(size)) - SMALLEST_POWER;
      if (value < 0) this.#negative[power]! += 1;
      else this.#positive[power]! += 1;
      if (size > this.#limit || this.#largest.length < WORST) this.#insert(this.scanned + index, value);
    }
    this.scanned += values.length;
  }

  #insert(place: number, value: number): void {
    this.#largest.push({ place, value });
    if (this.#largest.length < 2 * WORST) return;
    this.#trim();
  }

  #trim(): void {
    this.#largest.sort((a, b) => Math.abs(b.value) - Math.abs(a.value) || a.place - b.place);
    this.#largest = this.#largest.slice(0, WORST);
    if (this.#largest.length === WORST) this.#limit = Math.abs(this.#largest.at(-1)!.value);
  }

  /** The elements that are not finite, by place, then those of largest magnitude; at most 20. */
  worst(): PlacedElement[] {
    this.#trim();
    return [...this.#notFinite, ...this.#largest].slice(0, WORST);
  }

  /** Bars of equal width; null without the least and largest value. */
  linear(): LinearHistogram | null {
    if (this.low === null || this.high === null) return null;
    const counts = [...this.#linear];
    const width = (this.high - this.low) / counts.length;
    const edges = counts.map((_, bar) => this.low! + bar * width);
    return { edges: [...edges, this.high], counts };
  }

  /** Elements by powers of two, as the statistics of every step record them. */
  powers(): { lower: number[]; upper: number[]; counts: number[] } {
    const bins: { lower: number; upper: number; count: number }[] = [];
    const span = (counts: Float64Array): [number, number] => [
      counts.findIndex((count) => count > 0),
      counts.findLastIndex((count) => count > 0),
    ];
    const [least, most] = span(this.#negative);
    for (let power = most; power >= 0 && power >= least; power -= 1)
      bins.push({
        lower: -(2 ** (power + 1 + SMALLEST_POWER)),
        upper: -(2 ** (power + SMALLEST_POWER)),
        count: this.#negative[power]!,
      });
    const [first, last] = span(this.#positive);
    for (let power = Math.max(0, first); power <= last; power += 1)
      bins.push({
        lower: 2 ** (power + SMALLEST_POWER),
        upper: 2 ** (power + 1 + SMALLEST_POWER),
        count: this.#positive[power]!,
      });
    return {
      lower: bins.map((bin) => bin.lower),
      upper: bins.map((bin) => bin.upper),
      counts: bins.map((bin) => bin.count),
    };
  }
}

/** Return the ranges of bytes that read a tensor part by part: from `first` to `end`, exclusive. */
export function partsOf(bytes: number, elementBytes: number, most = 4 * 1024 * 1024): [number, number][] {
  const step = Math.max(elementBytes, Math.floor(most / elementBytes) * elementBytes);
  const parts: [number, number][] = [];
  for (let first = 0; first < bytes; first += step) parts.push([first, Math.min(bytes, first + step)]);
  return parts;
}
