import { api, read, RequestError } from "../../api/client";
import { compact, type Config } from "./config";

// Reading, writing and removing a rule config of a project, without overwriting what somebody else has changed meanwhile.

/** A stored rule config, and the version that a change must name. */
export interface Stored {
  config: Config;
  etag: string;
}

/** Read a rule config of a project. */
export async function readStored(project: string, name: string, signal?: AbortSignal): Promise<Stored> {
  const path = { project, name };
  const { data, response } = await api.GET("/v1/projects/{project}/rules/{name}", {
    params: { path },
    ...(signal ? { signal } : {}),
  });
  return { config: compact(data?.config ?? {}), etag: response.headers.get("etag") ?? "" };
}

/** Write a rule config. Throws a `RequestError` with status 412 if it is not the version of `etag`; null creates one that must not exist. */
export async function writeStored(
  project: string,
  name: string,
  config: Config,
  etag: string | null,
): Promise<void> {
  await read(
    api.PUT("/v1/projects/{project}/rules/{name}", {
      params: { path: { project, name } },
      headers: etag === null ? { "If-None-Match": "*" } : { "If-Match": etag },
      body: { ...config, name },
    }),
  );
}

/** Remove a rule config, if it is the version of `etag`. */
export async function removeStored(project: string, name: string, etag: string): Promise<void> {
  await api.DELETE("/v1/projects/{project}/rules/{name}", {
    params: { path: { project, name } },
    headers: { "If-Match": etag },
  });
}

/** Return an error of a request; another error is one that the page did not expect. */
export function requestError(error: unknown): RequestError {
  return error instanceof RequestError ? error : new RequestError(0, String(error));
}
