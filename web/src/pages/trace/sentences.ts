import type { Schemas } from "../../api/client";
import { formatCount, formatNumber } from "../../components/format";

// What a trace says, in sentences.

type Tensor = Schemas["TracedTensorOutput"];

const PHASES: Record<string, string> = {
  forward: "forward pass",
  backward: "backward pass",
  recomputation: "recomputation",
  gradients: "processing of gradients",
  optimizer: "update",
  eager: "execution by Python",
  graph: "graph",
};

/** A name of a recorder, cut so that a sentence with it stays one, and without what turns the direction of the text after it. */
export function clipped(text: string, length = 120): string {
  const plain = text.replaceAll(/[\u202a-\u202e\u2066-\u2069]/g, "");
  return plain.length > length ? `${plain.slice(0, length)}…` : plain;
}

/** A phase in words. */
export function phaseText(phase: string): string {
  return PHASES[phase] ?? phase;
}

/** A shape as `16 × 3`; `scalar` without dimensions, `?` for a dimension that was not recorded. */
export function shapeText(shape: readonly number[]): string {
  return shape.map((size) => (size < 0 ? "?" : String(size))).join(" × ") || "scalar";
}

/** The values of a tensor that are not finite: `31 −inf of 48`; empty if there are none, or none were counted. */
export function badText(tensor: Tensor): string {
  const health = tensor.health;
  if (health === null) return tensor.nonfinite === true ? "not finite" : "";
  const counts: [number, string][] = [
    [health.nan, "NaN"],
    [health.pos_inf, "+inf"],
    [health.neg_inf, "−inf"],
  ];
  const parts = counts
    .filter(([count]) => count > 0)
    .map(([count, name]) => (health.exact ? `${formatCount(count)} ${name}` : name));
  return parts.length === 0 ? "" : `${parts.join(", ")} of ${formatCount(health.elements)}`;
}

/** State of a tensor in one word, with its tone. */
export function stateOf(tensor: Tensor): { text: string; tone: "ok" | "fault" | "quiet" } {
  const bad = badText(tensor);
  if (bad !== "") return { text: bad, tone: "fault" };
  if (tensor.health !== null || tensor.nonfinite === false) return { text: "finite", tone: "ok" };
  return { text: "not checked", tone: "quiet" };
}

/** Range of the finite values of a tensor: `−14.9 … 0`; empty if it was not recorded. */
export function rangeText(tensor: Tensor): string {
  const [low, high] = tensor.health?.figures ?? [];
  return low == null || high == null ? "" : `${formatNumber(low)} … ${formatNumber(high)}`;
}

/** Where an operation ran: `step 5, forward pass of head`. */
export function whereText(operation: Pick<Schemas["OperationDigest"], "step" | "phase" | "module">): string {
  const step = operation.step < 0 ? "" : `step ${operation.step}, `;
  const inside = operation.module === "" ? "" : ` of ${clipped(operation.module)}`;
  return `${step}${phaseText(operation.phase)}${inside}`;
}

/** What the first bad operation did, after its name: `made 31 −inf of 48 from finite inputs`. */
export function causeText(origin: Schemas["OriginOutput"]): string {
  if (origin.cause === "error") return "raised an exception";
  const bad = origin.tensor === null ? "" : badText(origin.tensor);
  const values = bad === "" || bad === "not finite" ? "values that are not finite" : bad;
  if (origin.cause === "operation") return `made ${values} from finite inputs`;
  const name = clipped(origin.tensor?.name || "a tensor");
  return `read ${name}, which was not finite when the step began (${values})`;
}

/** What explains an origin in its finite inputs: `input 0 has 31 zeros of 48`; empty if nothing is counted. */
export function inputsText(origin: Schemas["OriginOutput"]): string {
  if (origin.cause !== "operation") return "";
  const parts = origin.inputs.map((tensor, number) => {
    const name = `input ${number}${tensor.name === "" ? "" : ` (${clipped(tensor.name)})`}`;
    const zeros = tensor.health?.zero ?? 0;
    const negative = tensor.health?.negative ?? 0;
    const counts = [
      ...(zeros > 0 ? [`${formatCount(zeros)} ${zeros === 1 ? "zero" : "zeros"}`] : []),
      ...(negative > 0 ? [`${formatCount(negative)} negative`] : []),
    ];
    const range = rangeText(tensor);
    if (counts.length === 0 && range === "") return "";
    const values = [counts.join(" and "), range === "" ? "" : `values ${range}`].filter(
      (text) => text !== "",
    );
    const count = counts.length === 0 ? "" : ` of ${formatCount(tensor.health?.elements)}`;
    return `${name} has ${values[0]}${count}${values.length > 1 ? `, ${values[1]}` : ""}`;
  });
  return parts
    .filter((text) => text !== "")
    .slice(0, 3)
    .join("; ");
}

const UNCHECKED = new Set(["no_tensor", "shape"]);

/** The answer if nothing was damaged. */
export function nothingText(
  trace: Schemas["TraceOutput"],
  contained: number,
): { title: string; text: string } {
  if (UNCHECKED.has(trace.mode))
    return {
      title: "This trace does not say which values were finite.",
      text: `It was recorded in mode ${trace.mode}. Record one in mode curt_health, the default.`,
    };
  if (trace.alerts === 0)
    return {
      title: "All values were finite.",
      text: `None of ${formatCount(trace.operations)} operations made NaN or infinity.`,
    };
  const few = contained === 1 ? "1 operation" : `${formatCount(contained)} operations`;
  return {
    title: "No value that is not finite reached a loss, a gradient or a parameter.",
    text:
      contained === 0
        ? `${formatCount(trace.alerts)} operations passed on infinity that the program wrote, such as a mask.`
        : `${few} made NaN or infinity, which a mask or torch.where removed.`,
  };
}

/** `Steps 4–5`. */
export function stepsText(first: number | string, last: number | string): string {
  return String(first) === String(last) ? `step ${first}` : `steps ${first}–${last}`;
}
