import { beforeEach, expect, it } from "vitest";
import { logIn, takeTokenFromLink, token } from "./session";

function openLink(value: string): string | null {
  history.replaceState(null, "", `/runs?q=1#token=${value}`);
  return takeTokenFromLink();
}

beforeEach(() => {
  sessionStorage.clear();
  localStorage.clear();
});

it("logs in by a link if there is no session, and removes the token from the address", () => {
  expect(openLink("wst_a")).toBeNull();
  expect(token()).toBe("wst_a");
  expect(location.href).toMatch(/\/runs\?q=1$/);
});

it("leaves a session as it is, and returns the other token", () => {
  logIn("wst_mine", true);
  expect(openLink("wst_theirs")).toBe("wst_theirs");
  expect([token(), localStorage.length, sessionStorage.length]).toEqual(["wst_mine", 1, 0]);
  expect(location.hash).toBe("");
  expect(openLink("wst_mine")).toBeNull();
  expect(localStorage.length).toBe(1);
});
