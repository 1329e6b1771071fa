import type { Schemas } from "../../api/client";

// The ranges of number formats and of a tensor's magnitudes on one axis of powers of two.

/** A range of a number format, in powers of two. */
export interface FormatRange {
  name: string;
  /** Below it, numbers become zero. */
  smallest: number;
  /** Below it, numbers have fewer digits. */
  normal: number;
  largest: number;
}

/** IEEE 754 (fp16, fp32), the truncated fp32 (bf16), and OCP FP8: significand bits give the smallest subnormal number. */
export const FORMAT_RANGES: readonly FormatRange[] = [
  { name: "fp16", smallest: -24, normal: -14, largest: Math.log2(65504) },
  { name: "bf16", smallest: -133, normal: -126, largest: Math.log2(3.3895313892515355e38) },
  { name: "fp32", smallest: -149, normal: -126, largest: Math.log2(3.4028234663852886e38) },
  { name: "fp8_e4m3", smallest: -9, normal: -6, largest: Math.log2(448) },
  { name: "fp8_e5m2", smallest: -16, normal: -14, largest: Math.log2(57344) },
];

/** The shown powers of two. */
export interface PowerAxis {
  low: number;
  high: number;
}

const LEAST: PowerAxis = { low: -32, high: 20 }; // shows the whole ranges of the formats of 8 and 16 bits but bf16

/** Return an axis that shows the narrow formats whole, and the tensor. Wide formats go on beyond its ends. */
export function axisOf(headroom: Pick<Schemas["TensorHeadroom"], "largest" | "smallest">): PowerAxis {
  const margin = 4;
  const [low, high] = [headroom.smallest, headroom.largest];
  return {
    low: low === null || low <= 0 ? LEAST.low : Math.min(LEAST.low, Math.floor(Math.log2(low)) - margin),
    high: high === null || high <= 0 ? LEAST.high : Math.max(LEAST.high, Math.ceil(Math.log2(high)) + margin),
  };
}

/** Return the place of a power on the axis, from 0 to 1, limited to it. */
export function placeOf(axis: PowerAxis, power: number): number {
  return Math.min(1, Math.max(0, (power - axis.low) / (axis.high - axis.low)));
}

/** Powers of ten to label, by their exponents; about `most`. */
export function ticksOf(axis: PowerAxis, most: number): number[] {
  const [low, high] = [axis.low, axis.high].map((power) => power * Math.log10(2)) as [number, number];
  const step = Math.ceil((high - low) / Math.max(1, most));
  const ticks: number[] = [];
  for (let exponent = Math.ceil(low / step) * step; exponent <= high; exponent += step) ticks.push(exponent);
  return ticks;
}
