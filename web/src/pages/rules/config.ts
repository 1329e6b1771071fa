// Rule configs as people write them: without what is the default, with short actions, and as YAML that PyYAML reads back.

/** Data of a rule config, as an entry of `rules` in a rule file. */
export type Config = Record<string, unknown>;

const ORDER = [
  "rule",
  "name",
  "params",
  "tensors",
  "for",
  "keep_firing",
  "severity",
  "actions",
  "labels",
  "message",
  "dry_run",
  "inhibits",
];

/** Whether a value is an object with names. */
export function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Return a rule config without fields that have their default. Rule and severity are always there. */
export function compact(config: Config): Config {
  const written: Config = {};
  const names = [...ORDER, ...Object.keys(config).filter((name) => !ORDER.includes(name))];
  for (const name of names) {
    const value = short(name, config[name]);
    if (value === undefined || (name === "name" && (value === config["rule"] || value === ""))) continue;
    written[name] = value;
  }
  return written;
}

/** Return a config with its fields in the usual order. */
export function ordered(config: Config): Config {
  const place = (name: string): number => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return Object.fromEntries(Object.entries(config).sort(([a], [b]) => place(a) - place(b)));
}

function short(name: string, value: unknown): unknown {
  if (value === undefined || value === null || value === false) return undefined;
  if (Array.isArray(value)) {
    if (value.length === 0) return undefined;
    return name === "actions" ? value.map(shortAction) : value;
  }
  if (!isMapping(value)) return value;
  const kept = Object.entries(value).filter(([part, of]) =>
    name === "params" || name === "labels" ? true : !isDefault(name, part, of),
  );
  if (kept.length === 0) return name === "keep_firing" ? { steps: 1 } : undefined;
  return Object.fromEntries(kept);
}

function isDefault(name: string, part: string, value: unknown): boolean {
  if (value === null) return true;
  return (name === "for" || name === "keep_firing") && value === (part === "steps" ? 1 : 0);
}

function shortAction(action: unknown): unknown {
  if (!isMapping(action)) return action;
  if (action["kind"] === "stop" || action["kind"] === "snapshot") return action["kind"];
  if (action["kind"] === "notify") return { notify: action["receiver"] };
  if (action["kind"] === "webhook") return { webhook: action["url"] };
  return action;
}

/** The actions of a rule config by kind, whichever way they are written. */
export interface Actions {
  stop: boolean;
  snapshot: boolean;
  notify: string[];
  webhooks: string[];
}

/** Return the actions of a rule config. */
export function actionsOf(config: Config): Actions {
  const actions: Actions = { stop: false, snapshot: false, notify: [], webhooks: [] };
  const written = config["actions"];
  for (const action of (Array.isArray(written) ? written : []).map(shortAction)) {
    if (action === "stop") actions.stop = true;
    else if (action === "snapshot") actions.snapshot = true;
    else if (isMapping(action) && "notify" in action) actions.notify.push(String(action["notify"]));
    else if (isMapping(action) && "webhook" in action) actions.webhooks.push(String(action["webhook"]));
  }
  return actions;
}

/** Return actions as they are written in a rule file. */
export function writtenActions(actions: Actions): unknown[] {
  return [
    ...(actions.stop ? ["stop"] : []),
    ...(actions.snapshot ? ["snapshot"] : []),
    ...actions.notify.map((notify) => ({ notify })),
    ...actions.webhooks.map((webhook) => ({ webhook })),
  ];
}

/** Return what happens when an alert of a rule config fires, in a few words. */
export function actionText(config: Config): string {
  if (config["dry_run"] === true) return "nothing (dry run)";
  const { stop, snapshot, notify, webhooks } = actionsOf(config);
  const parts = [
    ...(stop ? ["stops the job"] : []),
    ...(snapshot ? ["takes a snapshot"] : []),
    ...(notify.length > 0 ? [`notifies ${notify.join(", ")}`] : []),
    ...(webhooks.length > 0 ? [webhooks.length === 1 ? "posts to a URL" : "posts to URLs"] : []),
  ];
  return parts.join(", ") || "is shown";
}

/** Return a config with a field set; undefined removes it. */
export function withField(config: Config, name: string, value: unknown): Config {
  const changed = { ...config, [name]: value };
  if (value === undefined || (isMapping(value) && Object.keys(value).length === 0)) delete changed[name];
  return changed;
}

/** Return a config with a part of a field set, such as a parameter; undefined removes it. */
export function withPart(config: Config, name: string, part: string, value: unknown): Config {
  const parts = isMapping(config[name]) ? config[name] : {};
  return withField(config, name, withField(parts, part, value));
}

/** Return the number of consecutive steps that findings must last. */
export function stepsOf(config: Config): number {
  const duration = config["for"];
  const steps = isMapping(duration) ? Number(duration["steps"] ?? 1) : 1;
  return Number.isInteger(steps) && steps > 0 ? steps : 1;
}

/** Return data as YAML. */
export function toYaml(data: Config): string {
  return Object.entries(data)
    .map(([name, value]) => entry(scalar(name), value, ""))
    .join("");
}

function entry(name: string, value: unknown, indent: string): string {
  const inner = `${indent}  `;
  if (isMapping(value) && Object.keys(value).length > 0)
    return `${indent}${name}:\n${Object.entries(value)
      .map(([part, of]) => entry(scalar(part), of, inner))
      .join("")}`;
  if (Array.isArray(value) && value.length > 0) {
    const line = `${indent}${name}: [${value.map(scalar).join(", ")}]\n`;
    if (value.every((item) => typeof item !== "object" || item === null) && line.length <= 80) return line;
    return `${indent}${name}:\n${value.map((item) => listed(item, inner)).join("")}`;
  }
  if (typeof value === "string" && isBlock(value)) {
    const lines = value.replace(/\n$/, "").split("\n");
    const text = lines.map((line) => (line === "" ? "" : inner + line)).join("\n");
    return `${indent}${name}: ${value.endsWith("\n") ? "|" : "|-"}\n${text}\n`;
  }
  return `${indent}${name}: ${scalar(value)}\n`;
}

function listed(item: unknown, indent: string): string {
  if (isMapping(item) && Object.keys(item).length > 0) {
    const lines = Object.entries(item)
      .map(([name, value]) => entry(scalar(name), value, `${indent}  `))
      .join("");
    return `${indent}- ${lines.slice(indent.length + 2)}`;
  }
  return `${indent}- ${scalar(item)}\n`;
}

const PLAIN = /^[A-Za-z_][\w./-]*( [\w./-]+)*$/;
const RESERVED = /^(true|false|null|yes|no|on|off|y|n)$/i;
const NOT_PRINTABLE = /[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]/g;
const CONTROL = /[\u0000-\u0009\u000b-\u001f]/;

function isBlock(text: string): boolean {
  return (
    /\n./.test(text) &&
    !/^[ \n]/.test(text) &&
    !/\n\n$/.test(text) &&
    !CONTROL.test(text) &&
    text.search(NOT_PRINTABLE) < 0
  );
}

function scalar(value: unknown): string {
  if (typeof value === "number") {
    const text = String(value);
    // Without a point, YAML 1.1 reads 1e-7 as a text.
    return /^-?\d+e/.test(text) ? text.replace("e", ".0e") : text;
  }
  if (typeof value === "string" && PLAIN.test(value) && !RESERVED.test(value)) return value;
  return JSON.stringify(value ?? null).replace(
    NOT_PRINTABLE,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}
