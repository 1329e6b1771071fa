import { describe, expect, it } from "vitest";

import { wordsOf } from "./scalar-names";

describe("names of metrics", () => {
  it("are words with units where the recorder measured", () => {
    expect(wordsOf("system/step_seconds")).toBe("Time of a step, seconds");
    expect(wordsOf("model_2.updates:missing")).toBe("Steps in a row without a finite update, model_2");
    expect(wordsOf("system/gpu_3_memory")).toBe("GPU 3, used memory, share");
  });
  it("are the program's own otherwise", () => {
    expect(wordsOf("accuracy.top.1")).toBe("accuracy.top.1");
    expect(wordsOf("toString")).toBe("toString");
  });
});
