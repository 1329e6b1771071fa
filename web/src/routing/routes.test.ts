import { describe, expect, it } from "vitest";
import { links, routeOf } from "./routes";

describe("routes", () => {
  it("leads back to the object of a link, whatever its name", () => {
    for (const name of ["fc1.weight:gradient", "a/b c?d#e", "ä€𝄞", "100%", "..", "'\"<b>"]) {
      expect(routeOf(links.tensor("p", "r", name))).toEqual({
        page: "tensor",
        project: "p",
        run: "r",
        tensor: name,
      });
      expect(routeOf(links.run("p", name))).toEqual({ page: "run", project: "p", run: name });
      expect(routeOf(links.alert("p", "r", name))).toEqual({
        page: "alert",
        project: "p",
        run: "r",
        fingerprint: name,
      });
      expect(routeOf(links.runs(name))).toEqual({ page: "runs", project: name });
    }
    expect(routeOf(links.trace("p", "r", "a", "0", "10", "12"))).toEqual({
      page: "trace",
      project: "p",
      run: "r",
      attempt: "a",
      worker: "0",
      first: "10",
      last: "12",
    });
  });

  it("knows no other paths", () => {
    for (const path of [
      "/nothing",
      "/projects/p/other",
      "/projects/p/runs/r/tensors",
      "/projects/%zz",
      "/admin/x",
    ])
      expect(routeOf(path).page).toBe("unknown");
  });

  it("names the rank whose rows a tensor's page shows", () => {
    expect(links.tensor("p", "r", "a", 3, 1)).toBe("/projects/p/runs/r/tensors/a?step=3&workers=1");
    expect(links.tensor("p", "r", "a", null, 0)).toBe("/projects/p/runs/r/tensors/a?workers=0");
    expect(links.tensor("p", "r", "a", 3, null)).toBe("/projects/p/runs/r/tensors/a?step=3");
  });
});
