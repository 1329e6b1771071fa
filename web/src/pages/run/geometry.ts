/** Where the pictures that share the step axis are drawn, in pixels: names are left of the plotted area. */
export interface Geometry {
  /** Width left of the plotted area. */
  gutter: number;
  /** Width of the plotted area. */
  plot: number;
  /** Width right of it. */
  right: number;
  /** Whether there is no space for names beside the plotted area; they are above it. */
  narrow: boolean;
}

/** Width of the numbers of a vertical axis. */
export const AXIS = 62;
const RIGHT = 14;
const NAMES = 250;
const NARROW = 760;

/** Return the geometry for a width. */
export function geometryOf(width: number): Geometry {
  const narrow = width < NARROW;
  const gutter = narrow ? AXIS : NAMES;
  return { gutter, plot: Math.max(60, width - gutter - RIGHT), right: RIGHT, narrow };
}
