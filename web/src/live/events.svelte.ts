import { EventSource } from "eventsource";
import type { Schemas } from "../api/client";
import { token } from "../api/session";

/** Connection to a stream of events: `live`, `connecting` (also after an interruption) or `off`. */
export type Connection = "live" | "connecting" | "off";

const QUIET_MS = 400; // events come in bursts; one reload serves a burst
const LONGEST_MS = 5_000; // a view is at most this old while events keep coming

/**
 * Calls `changed` after events of a project, or of one run, and after the connection was interrupted, because events may then be
 * missing. Create it while a component is initialised; it ends with the component.
 *
 * @param path - address of the stream, such as `/v1/projects/p/events/stream`; it may read state.
 */
export class LiveEvents {
  connection = $state<Connection>("connecting");

  constructor(path: () => string | null, changed: () => void) {
    $effect(() => {
      const address = path();
      if (address === null) {
        this.connection = "off";
        return;
      }
      return this.#follow(address, changed);
    });
  }

  #follow(address: string, changed: () => void): () => void {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let due = 0;
    const soon = (): void => {
      const now = Date.now();
      if (timer === undefined) due = now + LONGEST_MS;
      clearTimeout(timer);
      timer = setTimeout(
        () => {
          timer = undefined;
          changed();
        },
        Math.max(0, Math.min(QUIET_MS, due - now)),
      );
    };
    const source = new EventSource(new URL(address, location.origin), {
      fetch: (input, init) => {
        const value = token();
        const headers = { ...init.headers, ...(value === null ? {} : { authorization: `Bearer ${value}` }) };
        return fetch(input, { ...init, headers });
      },
    });
    let interrupted = false;
    source.onopen = () => {
      this.connection = "live";
      if (interrupted) soon();
      interrupted = false;
    };
    source.onerror = () => {
      this.connection = "connecting";
      if (!interrupted) soon(); // a service that is gone is shown at once
      interrupted = true;
    };
    for (const kind of Object.keys(EVENT_KINDS)) source.addEventListener(kind, soon);
    return () => {
      clearTimeout(timer);
      source.close();
    };
  }
}

// A stream's events are named; a listener is needed for each. The type fails to compile if the service adds one.
const EVENT_KINDS: Record<Schemas["CloudEvent"]["type"], true> = {
  "io.watchstep.run.started": true,
  "io.watchstep.run.ended": true,
  "io.watchstep.run.restart_allowed": true,
  "io.watchstep.alert.firing": true,
  "io.watchstep.alert.revised": true,
  "io.watchstep.alert.resolved": true,
  "io.watchstep.alert.acknowledged": true,
  "io.watchstep.stop.requested": true,
  "io.watchstep.stop.done": true,
  "io.watchstep.stop.would_have": true,
  "io.watchstep.rule.error": true,
  "io.watchstep.rule.no_data": true,
  "io.watchstep.rule.ok": true,
};

/** Calls `reload` every few seconds while the tab is visible and `active` is true: rows of statistics are not events. */
export function poll(active: () => boolean, reload: () => void, milliseconds = 5_000): void {
  $effect(() => {
    if (!active()) return;
    const timer = setInterval(() => {
      if (document.visibilityState === "visible") reload();
    }, milliseconds);
    return () => clearInterval(timer);
  });
}
