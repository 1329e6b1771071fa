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
 * sent to a server or a log. Without a session the token logs in. Another session stays as it is, and the token is returned: the person
 * decides, because the link may be somebody else's.
 */
export function takeTokenFromLink(): string | null {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const value = fragment.get("token");
  if (value === null) return null;
  history.replaceState(history.state, "", location.pathname + location.search);
  const present = token();
  if (present === null) logIn(value, false);
  return present === null || present === value ? null : value;
}
