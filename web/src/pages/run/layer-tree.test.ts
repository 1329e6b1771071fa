import { describe, expect, it } from "vitest";
import { linesOf, openAtFirst, type LayerTree } from "./layer-tree";

const names = [
  "model.embed.weight",
  "model.blocks.0.up.weight",
  "model.blocks.0.up.bias",
  "model.blocks.0.down.weight",
];
const names2 = [...names, "model.blocks.1.up.weight", "model.blocks.1.down.weight", "head:output"];
const node = (
  path: string,
  parent: number | null,
  first_row: number,
  end_row: number,
  rows: number[] = [],
) => ({
  path,
  module_type: "",
  name: path.split(".").at(-1) ?? "",
  parent,
  first_row,
  end_row,
  rows,
});
const tree: LayerTree = {
  names: names2,
  modules: [
    node("model", null, 0, 6),
    node("model.embed", 0, 0, 1, [0]),
    node("model.blocks", 0, 1, 6),
    node("model.blocks.0", 2, 1, 4),
    node("model.blocks.0.up", 3, 1, 3, [1, 2]),
    node("model.blocks.0.down", 3, 3, 4, [3]),
    node("model.blocks.1", 2, 4, 6),
    node("model.blocks.1.up", 6, 4, 5, [4]),
    node("model.blocks.1.down", 6, 5, 6, [5]),
    node("head", null, 6, 7, [6]),
  ],
};
const all = (): boolean => true;
const text = (lines: ReturnType<typeof linesOf>): string[] =>
  lines.map((line) => `${" ".repeat(line.depth)}${line.label} ${line.kind} ${line.rows.join(",")}`.trimEnd());

describe("the tree of layers", () => {
  it("draws each tensor in exactly one line, whatever is open", () => {
    for (const open of [all, () => false, (path: string) => path.endsWith("0") || path === "model"])
      expect(linesOf(tree, open, all).flatMap((line) => line.rows)).toEqual([0, 1, 2, 3, 4, 5, 6]);
  });

  it("names lines relative to the line above, and modules with one tensor as the tensor", () => {
    expect(text(linesOf(tree, all, all))).toEqual([
      "model open",
      " embed.weight tensor 0",
      " blocks open",
      "  0 open",
      "   up open",
      "    weight tensor 1",
      "    bias tensor 2",
      "   down.weight tensor 3",
      "  1 open",
      "   up.weight tensor 4",
      "   down.weight tensor 5",
      "head:output tensor 6",
    ]);
    expect(text(linesOf(tree, () => false, all))).toEqual([
      "model closed 0,1,2,3,4,5",
      "head:output tensor 6",
    ]);
  });

  it("leaves out what a search does not find, and modules that only wrap another", () => {
    expect(text(linesOf(tree, all, (row) => row === 1 || row === 2))).toEqual([
      "model.blocks.0.up open",
      " weight tensor 1",
      " bias tensor 2",
    ]);
    expect(linesOf(tree, all, () => false)).toEqual([]);
  });

  it("shows rows without a module", () => {
    expect(text(linesOf({ names: ["model:input"], modules: [] }, all, all))).toEqual([
      "model:input tensor 0",
    ]);
  });

  it("opens levels while they fit, and the way to what is interesting", () => {
    expect(openAtFirst(tree, [], 6)).toEqual(new Set(["model", "head", "model.embed", "model.blocks"]));
    expect(openAtFirst(tree, [1], 6).has("model.blocks.0.up")).toBe(true);
    expect(openAtFirst(tree, [1], 6).has("model.blocks.1")).toBe(false);
  });
});
