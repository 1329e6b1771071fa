import { api, read, RequestError, type Schemas } from "../../api/client";
import { setParams } from "../../routing/location.svelte";
import { ordered, toYaml, type Config } from "./config";

const PAUSE_MS = 300; // of typing, before the text is checked and written to the address
const MOST_IN_ADDRESS = 9_000; // characters with escapes; the service refuses longer addresses, and with them a reload

/**
 * A rule config that is being edited. Its text is the truth; the form shows the text's data and writes the text anew. The service
 * checks it after each pause, and an unsaved text is in the address as `draft`.
 */
export class Draft {
  text = $state("");
  /** Data of the text; null while it cannot be read. */
  data = $state.raw<Config | null>(null);
  /** The last check; that of an earlier text while `checking`. */
  check = $state.raw<Schemas["RuleCheck"] | null>(null);
  checking = $state(true);
  /** Why the service did not check. */
  problem = $state.raw<RequestError | null>(null);
  /** Whether the text is too long for the address, so that a reload loses it. */
  onlyHere = $state(false);
  readonly #project: string;
  readonly #stored: Config;
  #name: string;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #number = 0;

  /**
   * @param project - project of the rule config.
   * @param name - name that it is stored with.
   * @param stored - the stored one, without defaults.
   * @param text - the unsaved text; empty: there is none.
   */
  constructor(project: string, name: string, stored: Config, text: string) {
    this.#project = project;
    this.#name = name;
    this.#stored = stored;
    this.text = text || toYaml(stored);
    this.data = text === "" ? stored : null;
    void this.#run();
  }

  /** Whether the text differs from what is stored. */
  get changed(): boolean {
    return this.text !== toYaml(this.#stored);
  }

  /** The valid rule config of the text; null while there is none. */
  get valid(): Schemas["RuleCheck"]["config"] {
    return this.checking || this.problem !== null ? null : (this.check?.config ?? null);
  }

  get errors(): Schemas["RuleRemark"][] {
    return this.check?.remarks.filter((remark) => remark.level === "error") ?? [];
  }

  /** Take a text of the text editor. */
  setText(text: string): void {
    this.text = text;
    this.#soon();
  }

  /** Take data of the form. */
  setData(data: Config): void {
    this.data = data;
    this.text = toYaml(ordered(data));
    this.#soon();
  }

  /** Check with another name. */
  rename(name: string): void {
    this.#name = name;
    this.#soon();
  }

  /** Return to what is stored. */
  reset(): void {
    this.setData(this.#stored);
  }

  /** Stop the pending check, and leave the address as it is. */
  end(): void {
    clearTimeout(this.#timer);
    this.#number += 1;
  }

  #soon(): void {
    this.checking = true;
    this.#number += 1; // an answer that is on its way is about an earlier text
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.onlyHere = encodeURIComponent(this.text).length > MOST_IN_ADDRESS;
      setParams({ draft: this.changed && !this.onlyHere ? this.text : null });
      void this.#run();
    }, PAUSE_MS);
  }

  async #run(): Promise<void> {
    this.checking = true;
    const number = (this.#number += 1);
    const body = { name: this.#name, text: this.text };
    try {
      const check = await read(
        api.POST("/v1/projects/{project}/rule-checks", {
          params: { path: { project: this.#project } },
          body,
        }),
      );
      if (number !== this.#number) return; // the text has changed again
      [this.check, this.problem] = [check, null];
      this.data = check.data;
    } catch (error) {
      if (number !== this.#number) return;
      this.problem = error instanceof RequestError ? error : new RequestError(0, String(error));
    }
    this.checking = false;
  }
}
