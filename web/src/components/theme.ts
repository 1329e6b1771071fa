/** `system` follows the browser's setting. */
export type Theme = "system" | "light" | "dark";

const KEY = "watchstep.theme";

/** Return the chosen theme. */
export function theme(): Theme {
  const value = localStorage.getItem(KEY);
  return value === "light" || value === "dark" ? value : "system";
}

/** Apply the chosen theme to the document. */
export function applyTheme(): void {
  const value = theme();
  if (value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  dispatchEvent(new Event("watchstep-theme")); // canvases draw again
}

/** Choose a theme, and apply it. */
export function chooseTheme(value: Theme): void {
  if (value === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, value);
  applyTheme();
}

/** Calls `draw` whenever the colours change: another theme, or another setting of the system. Returns a function that stops. */
export function onThemeChange(draw: () => void): () => void {
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", draw);
  addEventListener("watchstep-theme", draw);
  return () => {
    media.removeEventListener("change", draw);
    removeEventListener("watchstep-theme", draw);
  };
}

/** Return the present value of a colour of `theme.css`, such as `--series-1`, as the browser computes it. */
export function colour(name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  probe.style.display = "none";
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
