// The rows of the timeline: modules as a tree, in the order in which they ran first. Rows of closed modules have the operations of all
// modules in them.

export interface ModuleRow {
  /** Path of the module; empty: operations outside of the model. */
  path: string;
  label: string;
  depth: number;
  /** Whether other modules are in it. */
  hasParts: boolean;
  isOpen: boolean;
}

export interface ModuleRows {
  rows: readonly ModuleRow[];
  /** Row of each module, by its place in the list of modules. */
  rowOf: Int16Array;
  /** Row of operations whose module is not in the list. */
  otherRow: number;
}

interface TreeNode {
  path: string;
  parent: TreeNode | null;
  parts: Map<string, TreeNode>;
  /** Whether operations ran in it, not only in its parts. */
  isOwn: boolean;
}

/** Modules by their paths. */
export interface ModuleTree {
  root: TreeNode;
  /** Node of each module of the list. */
  nodes: readonly TreeNode[];
}

const MOST_ROWS = 1000;
/** Parts of a path below this depth are one. */
const MOST_DEPTH = 40;

/** Return the tree of a list of modules, in its order. */
export function moduleTree(modules: readonly string[]): ModuleTree {
  const root: TreeNode = { path: "", parent: null, parts: new Map(), isOwn: false };
  const nodes = modules.map((module) => {
    const labels = module === "" ? [] : module.split(".");
    if (labels.length > MOST_DEPTH) labels.push(labels.splice(MOST_DEPTH - 1).join("."));
    let node = root;
    labels.forEach((label, depth) => {
      let part = node.parts.get(label);
      if (part === undefined) {
        const path = depth === 0 ? label : `${node.path}.${label}`;
        part = { path, parent: node, parts: new Map(), isOwn: false };
        node.parts.set(label, part);
      }
      node = part;
    });
    node.isOwn = true;
    return node;
  });
  return { root, nodes };
}

/** Return the rows of a tree; `isOpen` decides whether the parts of a module have rows of their own. */
export function moduleRows({ root, nodes }: ModuleTree, isOpen: (path: string) => boolean): ModuleRows {
  const rows: ModuleRow[] = [];
  const rowOfNode = new Map<TreeNode, number>();
  const add = (node: TreeNode, prefix: string, depth: number): void => {
    if (rows.length >= MOST_ROWS) return;
    // A module that only wraps another one, and runs nothing itself, has no row of its own.
    let shown = node;
    while (shown.parts.size === 1 && !shown.isOwn) shown = [...shown.parts.values()][0]!;
    const open = shown.parts.size > 0 && isOpen(shown.path);
    const label = prefix === "" ? shown.path : shown.path.slice(prefix.length + 1);
    rowOfNode.set(shown, rows.length);
    rows.push({ path: shown.path, label, depth, hasParts: shown.parts.size > 0, isOpen: open });
    if (open) for (const part of shown.parts.values()) add(part, shown.path, depth + 1);
  };
  for (const node of root.parts.values()) add(node, "", 0);
  if (root.isOwn || rows.length === 0 || rows.length >= MOST_ROWS)
    rows.push({ path: "", label: "outside of the modules", depth: 0, hasParts: false, isOpen: false });
  const otherRow = rows.length - 1;
  const rowOf = Int16Array.from(nodes, (leaf) => {
    for (let node: TreeNode | null = leaf; node !== null; node = node.parent) {
      const row = rowOfNode.get(node);
      if (row !== undefined) return row;
    }
    return otherRow;
  });
  return { rows, rowOf, otherRow };
}

/** Return the modules that are open unless the reader decides otherwise: level by level while there are at most `limit` rows. */
export function openAtFirst(tree: ModuleTree, limit: number): ReadonlySet<string> {
  let open: ReadonlySet<string> = new Set();
  for (;;) {
    const next = new Set(open);
    for (const row of moduleRows(tree, (path) => open.has(path)).rows) if (row.hasParts) next.add(row.path);
    if (next.size === open.size || moduleRows(tree, (path) => next.has(path)).rows.length > limit)
      return open;
    open = next;
  }
}

/** Return the row of each operation. */
export function operationRows(module: Int16Array, { rowOf, otherRow }: ModuleRows): Int16Array {
  return module.map((number) => (number < 0 ? otherRow : rowOf[number]!));
}
