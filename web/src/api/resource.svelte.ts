import { untrack } from "svelte";
import { RequestError } from "./client";

/** Time after which a request that got no answer, or that the service was too busy for, is made again. */
export const RETRY_MS = 3_000;
const RETRIED = [0, 429, 503];

let pending = 0;

/** Count requests under way; `data-loading` on the document tells scripts that wait for a page, such as tests and screenshots. */
function count(change: 1 | -1): void {
  pending += change;
  document.documentElement.toggleAttribute("data-loading", pending > 0);
}

/**
 * A document that a view shows, with its states: loading, ready, failed, and stale (a reload failed; the earlier document stays).
 *
 * `request` runs again whenever state that it reads changes, and on `reload()`. Call it while a component is initialised.
 */
export class Resource<T> {
  value = $state.raw<T | null>(null);
  error = $state.raw<RequestError | null>(null);
  loading = $state(true);
  /** When the shown document was received, in milliseconds since 1970; null before. */
  loadedAt = $state<number | null>(null);
  #version = $state(0);

  constructor(request: (signal: AbortSignal) => Promise<T>) {
    $effect(() => {
      void this.#version;
      const controller = new AbortController();
      const answer = request(controller.signal);
      untrack(() => void this.#settle(answer, controller.signal));
      return () => controller.abort();
    });
    $effect(() => {
      // A service that restarts or is busy answers by itself later; other errors stay until something changes.
      if (this.loading || this.error === null || !RETRIED.includes(this.error.status)) return;
      const timer = setTimeout(() => this.reload(), RETRY_MS);
      return () => clearTimeout(timer);
    });
  }

  /** Whether the shown document is older than the service's state because the last request failed. */
  get stale(): boolean {
    return this.error !== null && this.value !== null;
  }

  /** Request the document again. The shown one stays until the answer. */
  reload(): void {
    this.#version += 1;
  }

  async #settle(answer: Promise<T>, signal: AbortSignal): Promise<void> {
    this.loading = true;
    count(1);
    try {
      const value = await answer.finally(() => count(-1));
      if (signal.aborted) return;
      this.value = value;
      this.error = null;
      this.loadedAt = Date.now();
    } catch (error) {
      if (signal.aborted) return;
      this.error = error instanceof RequestError ? error : new RequestError(0, String(error));
    }
    this.loading = false;
  }
}
