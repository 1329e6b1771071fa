import { getContext, setContext } from "svelte";
import type { Schemas } from "./client";

type Caller = Schemas["CallerOutput"];
const KEY = Symbol("caller");

/** Who is logged in, for all components below; the root component calls this once. */
export function provideCaller(caller: () => Caller | null): void {
  setContext(KEY, caller);
}

/** Return a function that returns who is logged in; null before the service has answered. */
export function currentCaller(): () => Caller | null {
  return getContext<() => Caller | null>(KEY);
}

/** Return a function that tells whether the logged-in token has a permission: controls that would be refused are not offered. */
export function permissions(): (permission: "read" | "operate" | "administer") => boolean {
  const caller = currentCaller();
  return (permission) => caller()?.permissions.includes(permission) ?? false;
}
