import type { Schemas } from "../../api/client";

// The lines beside and in the picture of the layers: modules that are open or closed, and tensors.

type Module = Pick<
  Schemas["ModuleNode"],
  "path" | "name" | "parent" | "rows" | "first_row" | "end_row" | "module_type"
>;

/** A line of the picture. */
export interface TreeLine {
  /** `open`: a module whose parts have lines of their own; `closed`: one whose tensors share this line; `tensor`: one tensor. */
  kind: "open" | "closed" | "tensor";
  /** Path of the module. */
  path: string;
  label: string;
  /** Type of the module, such as `Linear`; empty if it is not known. */
  type: string;
  depth: number;
  /** Rows of the matrix that this line draws. */
  rows: readonly number[];
}

export interface LayerTree {
  modules: readonly Module[];
  names: readonly string[];
}

/** Return the lines of a tree. `isOpen` decides per module; `shown` selects rows, such as those that a search finds. */
export function linesOf(
  tree: LayerTree,
  isOpen: (path: string) => boolean,
  shown: (row: number) => boolean,
): TreeLine[] {
  const children = new Map<number | null, number[]>();
  const owned = new Set<number>();
  tree.modules.forEach((module, place) => {
    const parent = module.parent ?? null;
    children.set(parent, [...(children.get(parent) ?? []), place]);
    for (const row of module.rows) owned.add(row);
  });
  const lines: TreeLine[] = [];
  const rowsIn = (module: Module): number[] =>
    range(module.first_row, module.end_row).filter((row) => owned.has(row) && shown(row));

  const addTensor = (row: number, path: string, prefix: string, depth: number, type = ""): void => {
    const name = tree.names[row] ?? "";
    const short =
      prefix !== "" && name.startsWith(prefix) ? name.slice(prefix.length).replace(/^\./, "") : name;
    lines.push({ kind: "tensor", path, label: short === "" ? name : short, type, depth, rows: [row] });
  };

  /** Add the lines of modules and rows in the order of their rows. `prefix` is what the lines above have named already. */
  const addParts = (
    modules: readonly number[],
    rows: readonly number[],
    prefix: string,
    depth: number,
  ): void => {
    const parts = [
      ...rows.filter(shown).map((row) => ({ at: row, add: () => addTensor(row, prefix, prefix, depth) })),
      ...modules.map((place) => ({
        at: tree.modules[place]!.first_row,
        add: () => addModule(place, prefix, depth),
      })),
    ];
    for (const part of parts.sort((a, b) => a.at - b.at)) part.add();
  };

  const addModule = (place: number, prefix: string, depth: number): void => {
    const module = tree.modules[place]!;
    const rows = rowsIn(module);
    if (rows.length === 0) return;
    if (rows.length === 1) return addTensor(rows[0]!, module.path, prefix, depth, module.module_type);
    const inner = (children.get(place) ?? []).filter((child) => rowsIn(tree.modules[child]!).length > 0);
    // A module that only wraps another one has no line of its own.
    if (inner.length === 1 && module.rows.filter(shown).length === 0)
      return addModule(inner[0]!, prefix, depth);
    const under = prefix !== "" && module.path.startsWith(`${prefix}.`);
    const label = under ? module.path.slice(prefix.length + 1) : module.path;
    if (!isOpen(module.path)) {
      lines.push({ kind: "closed", path: module.path, label, type: module.module_type, depth, rows });
      return;
    }
    lines.push({ kind: "open", path: module.path, label, type: module.module_type, depth, rows: [] });
    addParts(inner, module.rows, module.path, depth + 1);
  };

  const orphans = tree.names.map((_, row) => row).filter((row) => !owned.has(row));
  addParts(children.get(null) ?? [], orphans, "", 0);
  return lines;
}

/**
 * Return the modules that are open unless the reader decides otherwise: those that lead to the rows of interest, and level by level
 * all others while there are at most `limit` lines.
 */
export function openAtFirst(
  tree: LayerTree,
  interesting: readonly number[],
  limit = 32,
): ReadonlySet<string> {
  const open = new Set<string>();
  const depths = tree.modules.map(() => 0);
  tree.modules.forEach((module, place) => {
    depths[place] =
      module.parent === null || module.parent === undefined ? 0 : (depths[module.parent] ?? 0) + 1;
  });
  const all = (): boolean => true;
  for (let depth = 0; depth <= Math.max(0, ...depths); depth += 1) {
    const wider = new Set(open);
    tree.modules.forEach((module, place) => depths[place] === depth && wider.add(module.path));
    if (linesOf(tree, (path) => wider.has(path), all).length > limit) break;
    for (const path of wider) open.add(path);
  }
  for (const row of interesting)
    for (const module of tree.modules)
      if (row >= module.first_row && row < module.end_row) open.add(module.path);
  return open;
}

function range(first: number, end: number): number[] {
  return Array.from({ length: Math.max(0, end - first) }, (_, index) => first + index);
}
