const MOST = 500;
const LONGEST = 500;

/** Return nested settings as `name.name` and text, without those that are null or empty; at most 500. */
export function flatten(settings: unknown, prefix = ""): [string, string][] {
  if (settings === null || settings === undefined) return [];
  if (Array.isArray(settings) || typeof settings !== "object") {
    const text = typeof settings === "string" ? settings : JSON.stringify(settings);
    return text === "" || text === "[]" ? [] : [[prefix || "value", text.slice(0, LONGEST)]];
  }
  const entries: [string, string][] = [];
  for (const [name, value] of Object.entries(settings)) {
    entries.push(...flatten(value, prefix === "" ? name : `${prefix}.${name}`));
    if (entries.length > MOST) break;
  }
  return entries.slice(0, MOST);
}

/** The state of an attempt's job in words: a job whose exit code its backend does not know has not vanished for the reader. */
export const jobStateText = (state: string): string =>
  state === "vanished" ? "ended, exit code not known" : state;
