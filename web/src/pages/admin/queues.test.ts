import { expect, it } from "vitest";
import { lagTone, matchersOf } from "./queues";

it("names how far a queue is behind", () => {
  expect([0, 9.9, 10, 60].map((seconds) => lagTone(seconds).text)).toEqual([
    "up to date",
    "up to date",
    "behind",
    "far behind",
  ]);
});

it("reads matchers from lines and commas", () => {
  expect(matchersOf(" rule=a, run=~x.*\n\nseverity!=info ")).toEqual([
    "rule=a",
    "run=~x.*",
    "severity!=info",
  ]);
});
