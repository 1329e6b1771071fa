import { isMapping } from "./config";

// The fields of a form, from the JSON schema of a rule's parameters.

/** A field for one parameter. */
export interface Field {
  name: string;
  kind: "number" | "integer" | "choice" | "switch" | "text" | "lines" | "other";
  description: string;
  /** Value without the parameter; undefined if there is none. */
  default: unknown;
  required: boolean;
  /** Choices of a `choice`. */
  choices: (string | number)[];
  low: number | null;
  high: number | null;
  /** Whether the ends themselves are not allowed. */
  lowOpen: boolean;
  highOpen: boolean;
  /** Unit or kind of a number; empty: none. */
  unit: string;
}

type Schema = Record<string, unknown>;

/** Return the fields of a JSON schema, in its order. */
export function fieldsOf(schema: Schema): Field[] {
  const properties = isMapping(schema["properties"]) ? schema["properties"] : {};
  const required = Array.isArray(schema["required"]) ? schema["required"] : [];
  return Object.entries(properties).map(([name, part]) =>
    fieldOf(name, isMapping(part) ? part : {}, required.includes(name)),
  );
}

function fieldOf(name: string, part: Schema, required: boolean): Field {
  const forms = (Array.isArray(part["anyOf"]) ? part["anyOf"] : [part]).filter(
    (form): form is Schema => isMapping(form) && form["type"] !== "null",
  );
  const only = forms.length === 1 ? { ...part, ...forms[0] } : part;
  const description = String(part["description"] ?? "");
  const limit = (key: string): number | null => (typeof only[key] === "number" ? only[key] : null);
  const kind = kindOf(only, forms);
  return {
    name,
    kind,
    description,
    default: part["default"],
    required,
    choices: Array.isArray(only["enum"]) ? (only["enum"] as (string | number)[]) : [],
    low: limit("minimum") ?? limit("exclusiveMinimum"),
    high: limit("maximum") ?? limit("exclusiveMaximum"),
    lowOpen: limit("minimum") === null && limit("exclusiveMinimum") !== null,
    highOpen: limit("maximum") === null && limit("exclusiveMaximum") !== null,
    unit: kind === "number" || kind === "integer" ? unitOf(name, description) : "",
  };
}

function kindOf(schema: Schema, forms: readonly Schema[]): Field["kind"] {
  if (Array.isArray(schema["enum"])) return "choice";
  const type = schema["type"];
  if (type === "number" || type === "integer") return type;
  if (type === "boolean") return "switch";
  if (type === "string") return "text";
  if (isListOfTexts(schema)) return "lines";
  const flat = forms.flatMap((form) => (Array.isArray(form["anyOf"]) ? (form["anyOf"] as Schema[]) : [form]));
  const texts = flat.every((form) => form["type"] === "string" || isListOfTexts(form));
  return texts && flat.some(isListOfTexts) ? "lines" : "other";
}

function isListOfTexts(schema: Schema): boolean {
  return schema["type"] === "array" && isMapping(schema["items"]) && schema["items"]["type"] === "string";
}

const UNITS: readonly [RegExp, string][] = [
  [/\bMiB\b/, "MiB"],
  [/\bGiB\b/, "GiB"],
  [/\bbytes\b/i, "bytes"],
  [/\bseconds\b/i, "s"],
  [/percent|%/i, "%"],
  [/^(?:\w+ ){0,2}(?:share|fraction)\b/i, "share"],
  [/^(?:\w+ ){0,2}ratio\b|\btimes\b|\bfactor\b/i, "×"],
  [/\bsteps\b/i, "steps"],
  [/\brecords\b/i, "records"],
];

/** Return the unit of a parameter, as its name or its description states it. */
export function unitOf(name: string, description: string): string {
  if (/(^|_)seconds$/.test(name)) return "s";
  if (/(^|_)share$/.test(name)) return "share";
  return UNITS.find(([pattern]) => pattern.test(description))?.[1] ?? "";
}

/** Return the allowed range of a number in words; empty if it is not limited. */
export function boundsText(field: Field): string {
  const { low, high } = field;
  const lower = low === null ? "" : field.lowOpen ? `more than ${low}` : `at least ${low}`;
  const upper = high === null ? "" : field.highOpen ? `less than ${high}` : `at most ${high}`;
  if (low !== null && high !== null && !field.lowOpen && !field.highOpen) return `${low} to ${high}`;
  return [lower, upper].filter(Boolean).join(", ");
}

/** Return the value that a text of an input means; undefined: the default. Texts that are no number stay texts, which the check reports. */
export function numberOf(text: string): number | string | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : trimmed;
}

/** Return a parameter's value as text for an input. */
export function shownValue(value: unknown): string {
  if (value === undefined || value === null) return "";
  if (Array.isArray(value)) return value.map(String).join("\n");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
