// The token of this browser tab. It is sent as a bearer token only; there are no cookies, so that other sites cannot use it.
const KEY = "watchstep.token";

/** Return the token; null before a login. */
export function token(): string | null {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
}

/** Store a token, for this tab or, if `remember`, for this browser. */
export function logIn(value: string, remember: boolean): void {
  logOut();
  (remember ? localStorage : sessionStorage).setItem(KEY, value);
}

/** Forget the token. It stays valid until it expires or is revoked. */
export function logOut(): void {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
}

/**
 * Take the token of a link such as `/#token=…`, which `watchstep serve` prints, and remove it from the address. A fragment is never
 * sent to a server or a log.
 */
export function takeTokenFromLink(): void {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const value = fragment.get("token");
  if (value === null) return;
  logIn(value, false);
  history.replaceState(history.state, "", location.pathname + location.search);
}
