import { expect, it } from "vitest";
import { freeName, searchRules } from "./catalogue";

const rule = (name: string, summary: string, usual_causes: string[] = [], group = "losses") => ({
  name,
  summary,
  usual_causes,
  group,
  default: "warning",
  why_off: "",
});
const RULES = [
  rule("overfit", "the validation loss rises"),
  rule("loss_spike", "the training loss jumps", ["The learning rate is too high."]),
  rule("nan_or_inf", "NaN or infinity damages training", ["Half precision overflows."], "gradients"),
  rule("sagemaker_overfit", "the validation loss rises", [], "sagemaker"),
];
const names = (text: string): string[] => searchRules(RULES, text).map((match) => match.rule.name);

it("finds rules by name, symptom, cause and the words that people use", () => {
  expect(names("")).toEqual(["loss_spike", "nan_or_inf", "overfit", "sagemaker_overfit"]);
  expect(names("overfit")).toEqual(["overfit", "sagemaker_overfit"]);
  expect(names("loss spike")).toEqual(["loss_spike"]);
  expect(names("fp16")).toEqual(["nan_or_inf"]);
  expect(names("gradients")).toEqual(["nan_or_inf"]);
  expect(names("nothing has this")).toEqual([]);
  expect(searchRules(RULES, "learning rate")[0]).toMatchObject({ cause: "The learning rate is too high." });
});

it("names a new rule config after its rule, with a number if that is taken", () => {
  expect(freeName("overfit", [])).toBe("overfit");
  expect(freeName("overfit", ["overfit", "overfit_2"])).toBe("overfit_3");
});
