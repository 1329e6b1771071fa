import type { Schemas } from "../../api/client";
import { smooth, type LineSeries } from "../../charts/line-chart";
import { formatNumber } from "../../components/format";

type Line = Schemas["BinnedLine"];

/** Modes that need not be named: of the training, and of what belongs to no pass. */
const USUAL_MODES = ["train", "global"];

/** Name of a line: its tensor, its rank if it is of one worker, and its mode if another line has the same tensor or it is not usual. */
export function nameOfLine(line: Line, lines: readonly Line[]): string {
  const modes = new Set(lines.filter((other) => other.tensor === line.tensor).map(({ mode }) => mode));
  const parts = [
    ...(line.worker === null ? [] : [`rank ${line.worker}`]),
    ...(modes.size > 1 || !USUAL_MODES.includes(line.mode) ? [line.mode] : []),
  ];
  return parts.length === 0 ? line.tensor : `${line.tensor} (${parts.join(", ")})`;
}

/** Return the lines without the losses read at `backward()` that equal one that the program logs under another name. */
export function withoutCopies(lines: readonly Line[]): Line[] {
  const places = ({ mode, worker, mean, count, nonfinite }: Line): string =>
    JSON.stringify([mode, worker, mean, count, nonfinite]);
  const logged = new Set(lines.filter(({ derived }) => !derived).map(places));
  return lines.filter((line) => !line.derived || !logged.has(places(line)));
}

/** Return the lines of a chart, with gaps where nothing was recorded. Evaluations are dashed. */
export function seriesOf(lines: readonly Line[], smoothing: number): LineSeries[] {
  return lines.map((line) => ({
    label: nameOfLine(line, lines),
    values: smooth(line.mean, smoothing),
    band: { low: line.min, high: line.max },
    dashed: !USUAL_MODES.includes(line.mode),
  }));
}

/** The newest recorded value of a line as text, also if it is not finite; `–` without a record. */
export function newestValue({ newest }: Line): string {
  if (newest === null) return "–";
  return NOT_FINITE[newest.text] ?? formatNumber(newest.value);
}

const NOT_FINITE: Record<string, string> = { nan: "NaN", inf: "∞", "-inf": "−∞" };

const WIDE_RANGE = 50;

/** Whether a logarithmic axis shows lines better: all values are positive, and the largest is far above the usual one. */
export function isLogarithmic(lines: readonly Line[]): boolean {
  const values = lines.flatMap((line) => line.mean).filter((value) => value !== null);
  if (values.length === 0 || values.some((value) => value <= 0)) return false;
  values.sort((a, b) => a - b);
  return values.at(-1)! > WIDE_RANGE * values[Math.floor(values.length / 2)]!;
}

/** A run of columns in which a line has values that are not finite. */
export interface Gap {
  first: number;
  last: number;
  count: number;
}

/** Return where lines have values that are not finite, as ranges of steps. */
export function nonfiniteRanges(line: Line, edges: readonly number[]): Gap[] {
  const gaps: Gap[] = [];
  line.nonfinite.forEach((count, column) => {
    if (count === 0) return;
    const [first, last] = [edges[column]!, edges[column + 1]! - 1];
    const before = gaps.at(-1);
    if (before !== undefined && before.last === first - 1)
      [before.last, before.count] = [last, before.count + count];
    else gaps.push({ first, last, count });
  });
  return gaps;
}

/** A scalar with all its lines, for a small chart of its own. */
export interface ScalarGroup {
  name: string;
  lines: Line[];
  /** The value of every record in the shown steps; null if records differ, or one is not finite. */
  constant: number | null;
  /** Number of records in the shown steps; null for a hyperparameter, which lasts until it is recorded again. */
  records: number | null;
}

const HYPERPARAMETER = /^(?:.*\.)?optimizer(?:_\d+)?:([^/]+)\/.*$/s;

/** Group the lines of hyperparameters by kind (learning rate, momentum, …) and those of other scalars by name. */
export function groupScalars(lines: readonly Line[]): ScalarGroup[] {
  const groups = new Map<string, Line[]>();
  for (const line of lines) {
    const name = hyperparameterOf(line) ?? line.tensor;
    groups.set(name, [...(groups.get(name) ?? []), line]);
  }
  return [...groups].map(([name, members]) => {
    const values = members.flatMap((line) => [...line.min, ...line.max]).filter((value) => value !== null);
    const first = values[0];
    const same =
      first !== undefined &&
      values.every((value) => value === first) &&
      members.every((line) => line.nonfinite.every((count) => count === 0));
    const records = members.reduce((sum, line) => sum + line.count.reduce((a, b) => a + b, 0), 0);
    return {
      name,
      lines: members,
      constant: same ? first : null,
      records: members.some((line) => hyperparameterOf(line) !== undefined) ? null : records,
    };
  });
}

function hyperparameterOf(line: Line): string | undefined {
  return HYPERPARAMETER.exec(line.tensor)?.[1]?.replaceAll("_", " ");
}

/** Return lines as columns of a table: the steps of each row, and a mean, least and largest value per line. */
export function linesAsColumns(
  lines: readonly Line[],
  edges: readonly number[],
): Record<string, readonly (number | null)[]> {
  const columns: Record<string, readonly (number | null)[]> = {
    first_step: edges.slice(0, -1),
    last_step: edges.slice(1).map((end) => end - 1),
  };
  for (const line of lines) {
    const name = nameOfLine(line, lines);
    columns[name] = line.mean;
    columns[`${name} min`] = line.min;
    columns[`${name} max`] = line.max;
  }
  return columns;
}
