import createClient, { type Middleware } from "openapi-fetch";
import type { components, paths } from "./schema";
import { token } from "./session";

/** Shapes of the API's documents, by their names in the OpenAPI document. */
export type Schemas = components["schemas"];

/** A failed request: the API's problem document (RFC 9457), or that no answer came. */
export class RequestError extends Error {
  constructor(
    /** HTTP status; 0 if the service did not answer. */
    readonly status: number,
    message: string,
    readonly hint: string = "",
  ) {
    super(message);
    this.name = "RequestError";
  }
}

const authorization: Middleware = {
  onRequest({ request }) {
    const value = token();
    if (value !== null && !request.headers.has("authorization"))
      request.headers.set("authorization", `Bearer ${value}`);
    return request;
  },
  async onResponse({ request, response }) {
    if (response.ok) return;
    if (response.status === 401 && request.headers.get("authorization") === `Bearer ${token()}`)
      dispatchEvent(new Event(UNAUTHORIZED));
    throw await errorOf(response);
  },
  onError({ error }) {
    if (error instanceof DOMException && error.name === "AbortError") return error;
    return new RequestError(
      0,
      "The service does not answer.",
      "Check that it runs and that you can reach it.",
    );
  },
};

/**
 * The typed client: `api.GET("/v1/projects/{project}/runs", { params: { path: { project } } })`. Failed requests throw `RequestError`,
 * so that `data` is always present; `read` below returns it. The browser revalidates by ETag, so that an unchanged answer is not sent.
 */
export const api = createClient<paths>({ baseUrl: location.origin });
api.use(authorization);

/** Return the document of a request: `await read(api.GET(…))`. Throws `RequestError`. */
export async function read<T>(request: Promise<{ data?: T; error?: unknown }>): Promise<T> {
  const { data } = await request;
  return data as T;
}

/** Request anything that the OpenAPI document does not describe as JSON, such as CSV, Parquet or bytes of a tensor. */
export async function fetchRaw(
  path: string,
  options: { signal?: AbortSignal; headers?: Record<string, string> } = {},
): Promise<Response> {
  const value = token();
  const headers = { ...options.headers, ...(value === null ? {} : { authorization: `Bearer ${value}` }) };
  let response: Response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new RequestError(
      0,
      "The service does not answer.",
      "Check that it runs and that you can reach it.",
    );
  }
  if (response.status === 401) dispatchEvent(new Event(UNAUTHORIZED));
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Name of the event of `window` after a request with a token that is not valid any more: the page shows the login. */
export const UNAUTHORIZED = "watchstep:unauthorized";

async function errorOf(response: Response): Promise<RequestError> {
  try {
    const problem = (await response.json()) as { detail?: string; title?: string; hint?: string };
    return new RequestError(
      response.status,
      problem.detail ?? problem.title ?? `status ${response.status}`,
      problem.hint ?? "",
    );
  } catch {
    return new RequestError(response.status, `The service answered with status ${response.status}.`);
  }
}
