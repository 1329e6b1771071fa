/** Offer a file for download. */
export function download(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name.replaceAll(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Return rows as CSV (RFC 4180). Null is an empty field; a text that a spreadsheet would run as a formula gets an apostrophe. */
export function csvOf(columns: Record<string, readonly (number | string | null)[]>): string {
  const names = Object.keys(columns);
  const length = Math.max(0, ...names.map((name) => columns[name]?.length ?? 0));
  const lines = [names.map(field).join(",")];
  for (let row = 0; row < length; row += 1)
    lines.push(names.map((name) => field(columns[name]?.[row] ?? null)).join(","));
  return lines.join("\r\n") + "\r\n";
}

function field(value: number | string | null): string {
  if (value === null) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
