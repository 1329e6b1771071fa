// The page's paths. The service uses the same ones in notifications (`watchstep_services.channels`) and serves the page under them.

/** What a path shows. */
export type Route =
  | { page: "projects" }
  | { page: "admin" }
  | { page: "runs" | "compare" | "rules"; project: string }
  | { page: "run"; project: string; run: string }
  | { page: "tensor"; project: string; run: string; tensor: string }
  | { page: "alert"; project: string; run: string; fingerprint: string }
  | {
      page: "trace";
      project: string;
      run: string;
      attempt: string;
      worker: string;
      first: string;
      last: string;
    }
  | { page: "unknown"; path: string };

/** Return what a path shows. */
export function routeOf(path: string): Route {
  let parts: string[];
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return { page: "unknown", path }; // not valid percent-encoding
  }
  const [first, project, kind, run, part, ...rest] = parts as (string | undefined)[];
  if (first === undefined || (first === "projects" && project === undefined)) return { page: "projects" };
  if (first === "admin" && parts.length === 1) return { page: "admin" };
  if (first !== "projects" || project === undefined) return { page: "unknown", path };
  if (kind === undefined || (kind === "runs" && run === undefined)) return { page: "runs", project };
  if ((kind === "compare" || kind === "rules") && run === undefined) return { page: kind, project };
  if (kind !== "runs" || run === undefined) return { page: "unknown", path };
  if (part === undefined) return { page: "run", project, run };
  const [name, worker, firstStep, lastStep] = rest;
  if (part === "tensors" && name !== undefined && rest.length === 1)
    return { page: "tensor", project, run, tensor: name };
  if (part === "alerts" && name !== undefined && rest.length === 1)
    return { page: "alert", project, run, fingerprint: name };
  if (part === "traces" && name && worker && firstStep && lastStep && rest.length === 4)
    return { page: "trace", project, run, attempt: name, worker, first: firstStep, last: lastStep };
  return { page: "unknown", path };
}

function join(...parts: string[]): string {
  return "/" + parts.map(encodeURIComponent).join("/");
}

/** Addresses of the pages. */
export const links = {
  projects: (): string => "/",
  /** The administration of a project; of the first one if null. */
  admin: (project: string | null = null): string =>
    project === null ? "/admin" : `/admin?project=${encodeURIComponent(project)}`,
  runs: (project: string): string => join("projects", project),
  compare: (project: string, runs: string[]): string =>
    `${join("projects", project, "compare")}?runs=${runs.map(encodeURIComponent).join(",")}`,
  rules: (project: string): string => join("projects", project, "rules"),
  run: (project: string, run: string): string => join("projects", project, "runs", run),
  /** A tensor, at a step, as one rank measured it. */
  tensor: (
    project: string,
    run: string,
    tensor: string,
    step?: number | null,
    rank?: number | null,
  ): string => {
    const query = [...(step == null ? [] : [`step=${step}`]), ...(rank == null ? [] : [`workers=${rank}`])];
    const path = join("projects", project, "runs", run, "tensors", tensor);
    return query.length === 0 ? path : `${path}?${query.join("&")}`;
  },
  alert: (project: string, run: string, fingerprint: string): string =>
    join("projects", project, "runs", run, "alerts", fingerprint),
  trace: (
    project: string,
    run: string,
    attempt: string,
    worker: string,
    first: string,
    last: string,
  ): string => join("projects", project, "runs", run, "traces", attempt, worker, first, last),
};
