// The address of the page. It holds the whole view state: paths name objects, the query string holds what is shown of them.

class Address {
  path = $state(location.pathname);
  query = $state.raw(new URLSearchParams(location.search));
}

export const address = new Address();

function read(): void {
  address.path = location.pathname;
  address.query = new URLSearchParams(location.search);
}

/** Go to an address of this page. `replace` keeps the length of the history, for changes of a view such as a zoom. */
export function navigate(href: string, { replace = false }: { replace?: boolean } = {}): void {
  const path = location.pathname;
  history[replace ? "replaceState" : "pushState"](null, "", href);
  read();
  if (path !== location.pathname) {
    scrollTo(0, 0);
    document.querySelector<HTMLElement>("main")?.focus({ preventScroll: true }); // screen readers continue at the new page
  }
}

/** Return a parameter of the view's state. */
export function param(name: string, missing = ""): string {
  return address.query.get(name) ?? missing;
}

/** Return a whole number of the view's state; null if it is missing or not a number. */
export function numberParam(name: string): number | null {
  const text = address.query.get(name);
  if (text === null || text.trim() === "") return null;
  const value = Number(text);
  return Number.isFinite(value) ? value : null;
}

/** Change parameters of the view's state; null and empty texts remove them. */
export function setParams(
  changes: Record<string, string | number | null>,
  { push = false }: { push?: boolean } = {},
): void {
  navigate(withParams(changes), { replace: !push });
}

/** Return the present address with changed parameters. */
export function withParams(changes: Record<string, string | number | null>): string {
  const query = new URLSearchParams(address.query);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  const text = query.toString();
  return address.path + (text === "" ? "" : `?${text}`);
}

/** Follow links of this page without loading it again. Returns a function that stops. */
export function followLinks(): () => void {
  const onClick = (event: MouseEvent): void => {
    if (
      event.defaultPrevented ||
      event.button !== 0 ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    const link = (event.target as Element | null)?.closest<HTMLAnchorElement>("a[href]");
    if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
    if (
      link.pathname.startsWith("/v1/") ||
      link.pathname.startsWith("/docs") ||
      link.getAttribute("href")?.startsWith("#")
    )
      return;
    event.preventDefault();
    navigate(link.pathname + link.search);
  };
  document.addEventListener("click", onClick);
  addEventListener("popstate", read);
  return () => {
    document.removeEventListener("click", onClick);
    removeEventListener("popstate", read);
  };
}
