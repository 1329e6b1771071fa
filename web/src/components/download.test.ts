import { expect, it } from "vitest";
import { csvOf } from "./download";

it("quotes what CSV needs, and leaves no text that a spreadsheet runs", () => {
  expect(csvOf({ step: [1, 2], "na,me": ['a"b', "=1+1"], value: [0.5, null] })).toBe(
    'step,"na,me",value\r\n1,"a""b",0.5\r\n2,\'=1+1,\r\n',
  );
  expect(csvOf({})).toBe("\r\n");
});
