import { describe, expect, it } from "vitest";
import { moduleRows, moduleTree, openAtFirst, operationRows } from "./module-rows";

const MODULES = ["", "net.embed", "net.layers.0.up", "net.layers.0", "net.layers.1.up", "net.layers.1"];
const all = (): boolean => true;

describe("module rows", () => {
  it("are a tree in the order in which modules ran, without wrappers", () => {
    const { rows } = moduleRows(moduleTree(MODULES), all);
    expect(rows.map((row) => `${" ".repeat(row.depth)}${row.label}`)).toEqual([
      "net",
      " embed",
      " layers",
      "  0",
      "   up",
      "  1",
      "   up",
      "outside of the modules",
    ]);
    expect(moduleRows(moduleTree(["a.b.c", "a.b.d"]), all).rows.map((row) => row.label)).toEqual([
      "a.b",
      "c",
      "d",
    ]);
  });

  it("have the operations of closed modules", () => {
    const tree = moduleRows(moduleTree(MODULES), (path) => path === "net");
    expect(tree.rows.map((row) => row.label)).toEqual(["net", "embed", "layers", "outside of the modules"]);
    expect([...tree.rowOf]).toEqual([3, 1, 2, 2, 2, 2]);
    expect([...operationRows(Int16Array.of(0, 1, 4, -1), tree)]).toEqual([3, 1, 2, 3]);
  });

  it("are opened level by level up to a number of rows", () => {
    expect([...openAtFirst(moduleTree(MODULES), 100)].sort()).toEqual([
      "net",
      "net.layers",
      "net.layers.0",
      "net.layers.1",
    ]);
    expect([...openAtFirst(moduleTree(MODULES), 5)].sort()).toEqual(["net"]);
    expect([...openAtFirst(moduleTree(MODULES), 1)]).toEqual([]);
  });

  it("survive any names", () => {
    for (const modules of [
      [],
      [""],
      [".."],
      ["a..b", "a."],
      Array.from({ length: 3000 }, (_, n) => `m${n}.${"x.".repeat(200)}`),
    ]) {
      const tree = moduleRows(moduleTree(modules), all);
      expect(tree.rows.length).toBeLessThanOrEqual(1001);
      for (const row of tree.rowOf) expect(tree.rows[row]).toBeDefined();
      expect(tree.rows[tree.otherRow]).toBeDefined();
      expect(openAtFirst(moduleTree(modules), 20).size).toBeLessThanOrEqual(3000);
    }
  });
});
