import type { Rgb } from "./scale";

// A scale for signed values, blue to orange, which people with any colour vision deficiency can tell apart; zero is near the background.
const LIGHT: readonly Rgb[] = [
  [5, 64, 130],
  [88, 150, 200],
  [244, 245, 247],
  [226, 140, 60],
  [140, 62, 0],
];
const DARK: readonly Rgb[] = [
  [150, 210, 255],
  [50, 120, 180],
  [38, 45, 53],
  [190, 105, 30],
  [255, 196, 120],
];

/** Return the colour of a position between −1 and 1; positions outside are limited. */
export function diverging(position: number, dark: boolean): Rgb {
  const stops = dark ? DARK : LIGHT;
  const place = ((Math.min(1, Math.max(-1, position)) + 1) / 2) * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(place));
  const [from, to] = [stops[index]!, stops[index + 1]!];
  return [0, 1, 2].map((channel) =>
    Math.round(from[channel]! + (to[channel]! - from[channel]!) * (place - index)),
  ) as unknown as Rgb;
}

/** Whether a colour of the theme, such as `rgb(20, 24, 29)`, is dark. */
export function isDark(rgb: string): boolean {
  const [red = 255, green = 255, blue = 255] = (rgb.match(/[\d.]+/g) ?? []).map(Number);
  return red * 0.299 + green * 0.587 + blue * 0.114 < 128;
}
