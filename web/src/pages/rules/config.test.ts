import { describe, expect, it } from "vitest";
import {
  actionsOf,
  actionText,
  compact,
  ordered,
  toYaml,
  withField,
  withPart,
  writtenActions,
} from "./config";

const FULL = {
  rule: "vanishing_gradient",
  name: "vanishing_gradient",
  params: { threshold: 1e-7 },
  tensors: { collection: null, include: null, exclude: "embed.*" },
  for: { steps: 3, seconds: 0 },
  keep_firing: null,
  severity: "critical",
  labels: {},
  message: null,
  actions: [{ kind: "stop" }, { kind: "notify", receiver: "ml-oncall" }],
  dry_run: false,
  inhibits: [],
};

describe("compact", () => {
  it("leaves out what is the default, and writes actions as people do", () => {
    expect(compact(FULL)).toEqual({
      rule: "vanishing_gradient",
      params: { threshold: 1e-7 },
      tensors: { exclude: "embed.*" },
      for: { steps: 3 },
      severity: "critical",
      actions: ["stop", { notify: "ml-oncall" }],
    });
    expect(compact({ ...FULL, name: "mine", keep_firing: { steps: 1, seconds: 0 } })).toMatchObject({
      name: "mine",
      keep_firing: { steps: 1 }, // not the same as null, which is the value of `for`
    });
  });
});

describe("toYaml", () => {
  it("writes what a person would write", () => {
    expect(toYaml(compact(FULL))).toBe(
      'rule: vanishing_gradient\nparams:\n  threshold: 1.0e-7\ntensors:\n  exclude: "embed.*"\nfor:\n  steps: 3\n' +
        "severity: critical\nactions:\n  - stop\n  - notify: ml-oncall\n",
    );
    expect(toYaml({ inhibits: ["a", "b c"], labels: {}, x: [] })).toBe(
      "inhibits: [a, b c]\nlabels: {}\nx: []\n",
    );
  });

  it("quotes texts that YAML would read as something else", () => {
    const texts = ["yes", "null", "1.5", "", " a", "a: b", "# c", "- d", "é\u0085", "a\tb", "@x", "true"];
    expect(toYaml({ texts }).split("\n").length).toBeGreaterThan(1);
    for (const text of texts) expect(toYaml({ text })).toMatch(/^text: ".*"\n$/);
    expect(toYaml({ text: "\u0085" })).toBe('text: "\\u0085"\n');
    expect(toYaml({ query: "SELECT a\n\nFROM b" })).toBe("query: |-\n  SELECT a\n\n  FROM b\n");
    expect(toYaml({ query: "a\nb\n" })).toBe("query: |\n  a\n  b\n");
    expect(toYaml({ query: " a\nb" })).toBe('query: " a\\nb"\n');
  });
});

it("reads actions in each form, and says what they do", () => {
  expect(actionsOf(FULL)).toEqual({ stop: true, snapshot: false, notify: ["ml-oncall"], webhooks: [] });
  expect(writtenActions(actionsOf(FULL))).toEqual(["stop", { notify: "ml-oncall" }]);
  expect(actionText(FULL)).toBe("stops the job, notifies ml-oncall");
  expect(actionText({ ...FULL, dry_run: true })).toBe("nothing (dry run)");
  expect(actionText({})).toBe("is shown");
});

it("sets and removes fields, in the usual order", () => {
  const changed = withPart({ severity: "info", rule: "a" }, "params", "x", 1);
  expect(Object.keys(ordered(changed))).toEqual(["rule", "params", "severity"]);
  expect(withPart(changed, "params", "x", undefined)).toEqual({ severity: "info", rule: "a" });
  expect(withField(changed, "severity", undefined)).toEqual({ rule: "a", params: { x: 1 } });
});
