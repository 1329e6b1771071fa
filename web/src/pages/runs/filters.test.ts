import { expect, it } from "vitest";
import { filtered, filtersOf, progressOf, toggled } from "./filters";

it("reads filters from an address and ignores what it does not know", () => {
  const filters = filtersOf(
    new URLSearchParams("search=a&state=running,nonsense,lost&tag=x,y&firing=1&sort=step&offset=-4"),
  );
  expect(filters).toEqual({
    search: "a",
    state: ["running", "lost"],
    tag: ["x", "y"],
    firing: true,
    sort: "step",
    order: "descending",
    offset: 0,
  });
  expect(filtered(filters)).toBe(true);
  expect(filtered(filtersOf(new URLSearchParams("sort=name&order=ascending")))).toBe(false);
});

it("counts steps from zero", () => {
  expect(progressOf({ last_step: 49, max_step: 100 })).toBe(0.5);
  expect(progressOf({ last_step: -1, max_step: 100 })).toBe(0);
  expect(progressOf({ last_step: 120, max_step: 100 })).toBe(1);
  expect(progressOf({ last_step: 5, max_step: null })).toBeNull();
});

it("selects at most eight runs", () => {
  const eight = [..."abcdefgh"];
  expect(toggled(eight, "i")).toEqual(eight);
  expect(toggled(eight, "a")).toEqual([..."bcdefgh"]);
  expect(toggled([], "a")).toEqual(["a"]);
});
