/** Number of lines that are shown before and after a line. */
const AROUND = 400;
/** Number of characters of a line that are shown. */
const MOST_CHARACTERS = 400;

/** Return the lines of a text around a line, counted from 1, and the number of the first of them. */
export function linesAround(text: string, line: number): { first: number; lines: readonly string[] } {
  const all = text.split(/\r\n|\r|\n/);
  if (all.at(-1) === "") all.pop();
  const first = Math.max(1, Math.min(line, all.length) - AROUND);
  const lines = all.slice(first - 1, first + 2 * AROUND);
  return {
    first,
    lines: lines.map((each) => (each.length > MOST_CHARACTERS ? `${each.slice(0, MOST_CHARACTERS)}…` : each)),
  };
}
