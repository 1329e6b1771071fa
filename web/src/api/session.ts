// The token of this browser tab; a new tab asks the others for theirs. It is sent as a bearer token only; there are no cookies, so that other sites cannot use it.
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

const CHANNEL = "watchstep.session";
const ANSWER_MS = 150;

/** Give the token of this tab to new tabs of this browser that ask for it. */
export function shareSession(): void {
  const channel = new BroadcastChannel(CHANNEL);
  channel.onmessage = ({ data }: MessageEvent<unknown>) => {
    const value = token();
    if (data === "ask" && value !== null) channel.postMessage({ token: value });
  };
}

/** Log in with the session of another tab, if there is one and this tab has none: a link that opens in a new tab is logged in. */
export async function joinSession(): Promise<void> {
  if (token() !== null) return;
  const channel = new BroadcastChannel(CHANNEL);
  await new Promise<void>((resolve) => {
    setTimeout(resolve, ANSWER_MS);
    channel.onmessage = ({ data }: MessageEvent<{ token?: unknown } | "ask">) => {
      if (data === "ask" || typeof data.token !== "string") return;
      if (token() === null) logIn(data.token, false);
      resolve();
    };
    channel.postMessage("ask");
  });
  channel.close();
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
