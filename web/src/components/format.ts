// Numbers, times and durations as people read them. The exact values are in the exported data.

const SMALLEST = 1e-3;
const LARGEST = 1e5;

/** A value: an integer exactly, `49,152`; any other with four significant digits, `0.01234`, `1.234e-9`; `–` if there is none. */
export function formatNumber(value: number | null | undefined): string {
  if (value == null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isSafeInteger(value)) return formatCount(value + 0).replaceAll("-", "−");
  return formatRounded(value);
}

/** A finite value with four significant digits, also if it is an integer. */
export function formatRounded(value: number): string {
  const size = Math.abs(value);
  const isPlain = value === 0 || (size >= SMALLEST && size < LARGEST);
  const text = isPlain ? String(Number(value.toPrecision(4))) : value.toExponential(3);
  return text.replaceAll("-", "−").replace("e+", "e");
}

/** A whole number with separators of thousands. */
export function formatCount(value: number | null | undefined): string {
  return value == null ? "–" : value.toLocaleString("en-US");
}

/** A share between 0 and 1 in percent. */
export function formatShare(value: number | null | undefined): string {
  return value == null ? "–" : `${Number((value * 100).toPrecision(3))} %`;
}

/** A size in bytes with a binary unit. */
export function formatBytes(value: number | null | undefined): string {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power < units.length - 1 && value >= 1024 ** (power + 1)) power += 1;
  return `${Number((value / 1024 ** power).toPrecision(3))} ${units[power]}`;
}

/** A duration in nanoseconds: `840 ms`, `12 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`. */
export function formatDuration(nanoseconds: number | null | undefined): string {
  if (nanoseconds == null) return "–";
  const seconds = nanoseconds / 1e9;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** A time in nanoseconds since 1970, in the reader's time zone. */
export function formatTime(nanoseconds: number | null | undefined): string {
  if (nanoseconds == null) return "–";
  return new Date(nanoseconds / 1e6).toLocaleString("sv-SE"); // 2026-11-26 04:05:06
}

/** How long ago a time in nanoseconds since 1970 was. */
export function formatAge(nanoseconds: number | null | undefined, now = Date.now()): string {
  if (nanoseconds == null) return "–";
  const age = now * 1e6 - nanoseconds;
  return age < 1e9 ? "now" : `${formatDuration(age)} ago`;
}
