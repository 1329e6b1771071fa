// Colour scales and axes of pictures that are drawn on a canvas.

/** Viridis, sampled: perceptually uniform, and readable with any colour vision deficiency and in grey. */
const VIRIDIS = [
  [68, 1, 84],
  [72, 40, 120],
  [62, 74, 137],
  [49, 104, 142],
  [38, 130, 142],
  [31, 158, 137],
  [53, 183, 121],
  [110, 206, 88],
  [181, 222, 43],
  [253, 231, 37],
] as const;

export type Rgb = readonly [number, number, number];

/** Return a colour of viridis for a position between 0 and 1; positions outside are limited. */
export function viridis(position: number): Rgb {
  const last = VIRIDIS.length - 1;
  const place = Math.min(1, Math.max(0, position)) * last;
  const index = Math.min(last - 1, Math.floor(place));
  const [from, to] = [VIRIDIS[index], VIRIDIS[index + 1]];
  if (from === undefined || to === undefined) throw new Error("viridis has no such entry");
  const share = place - index;
  return [0, 1, 2].map((channel) =>
    Math.round(from[channel]! + (to[channel]! - from[channel]!) * share),
  ) as unknown as Rgb;
}

/** Maps values to positions between 0 and 1, linearly or by their logarithm. */
export interface ColourScale {
  readonly low: number;
  readonly high: number;
  readonly logarithmic: boolean;
  /** Position of a value; null if the scale has no place for it (not finite, or not positive on a logarithmic scale). */
  position(value: number | null): number | null;
}

/**
 * Return a scale over the finite values. A logarithmic one ignores values that are not positive, and spans at most `decades`, so that
 * a single tiny value does not take all colours.
 */
export function colourScale(
  values: Iterable<number | null>,
  logarithmic: boolean,
  decades = 12,
): ColourScale {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || !Number.isFinite(value) || (logarithmic && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = logarithmic ? [1, 10] : [0, 1];
  if (logarithmic) low = Math.max(low, high / 10 ** decades);
  const convert = logarithmic ? Math.log10 : (value: number): number => value;
  const [from, to] = [convert(low), convert(high)];
  return {
    low,
    high,
    logarithmic,
    position(value) {
      if (value === null || !Number.isFinite(value) || (logarithmic && value <= 0)) return null;
      if (to === from) return 0.5;
      return Math.min(1, Math.max(0, (convert(value) - from) / (to - from)));
    },
  };
}
