import { api, fetchRaw, read, RequestError, type Schemas } from "../../api/client";
import { bytesOf, decode } from "./elements";
import type { ElementRange } from "./slices";

// Requests for saved tensors. Only what is shown is read, by ranges of bytes.

export type SavedObject = Schemas["SavedObject"];
type Mode = "train" | "eval" | "predict" | "global";

/** Return the text that names an object in the address. */
export function keyOf(object: SavedObject): string {
  return [object.attempt, object.worker, object.step, object.mode, object.collection]
    .filter((part) => part !== "")
    .join("/");
}

/** Return the object of the address, else the one closest to a step, else the newest; null without any. */
export function chosenObject(
  objects: readonly SavedObject[],
  key: string,
  step: number | null,
): SavedObject | null {
  const named = objects.find((object) => keyOf(object) === key);
  if (named !== undefined) return named;
  if (step === null) return objects.at(-1) ?? null;
  let closest: SavedObject | null = null;
  for (const object of objects)
    if (closest === null || Math.abs(object.step - step) < Math.abs(closest.step - step)) closest = object;
  return closest;
}

/** Name an object for a person. */
export function nameOfObject(object: SavedObject, objects: readonly SavedObject[]): string {
  const differs = (field: keyof SavedObject): boolean =>
    objects.some((other) => other[field] !== object[field]);
  return [
    `step ${object.step}`,
    ...(differs("worker") ? [`worker ${object.worker}`] : []),
    ...(differs("mode") ? [object.mode] : []),
    ...(differs("attempt") ? [object.attempt] : []),
    ...(object.collection !== "" ? [object.collection] : []),
  ].join(", ");
}

/** A tensor in an object. */
export interface SavedTensor {
  name: string;
  dtype: string;
  shape: readonly number[];
  bytes: number;
  /** Its place, if it is a part of a larger tensor. */
  part: Schemas["PartOutput"] | null;
  /** Figures of all elements; null if the tensor is too large for the service to compute them in one answer. */
  figures: Schemas["FiguresOutput"] | null;
  /** Address of its bytes. */
  path: string;
}

/** Describe a tensor of an object. Throws `RequestError`, with status 404 if the object does not contain it. */
export async function describe(
  project: string,
  run: string,
  object: SavedObject,
  name: string,
  signal: AbortSignal,
): Promise<SavedTensor> {
  const { attempt, worker, step, collection } = object;
  const place = {
    path: { project, run, attempt, worker, step, mode: object.mode as Mode },
    query: { name, ...(collection === "" ? {} : { collection }) },
  };
  const query = new URLSearchParams({ name, ...(collection === "" ? {} : { collection }) });
  const words = [
    project,
    "runs",
    run,
    "snapshots",
    attempt,
    String(worker),
    String(step),
    object.mode,
    "tensor",
  ];
  const path = `/v1/projects/${words.map(encodeURIComponent).join("/")}?${query}`;
  try {
    const summary = await read(
      api.GET("/v1/projects/{project}/runs/{run}/snapshots/{attempt}/{worker}/{step}/{mode}/summary", {
        params: place,
        signal,
      }),
    );
    const { dtype, shape, bytes, figures } = summary;
    return { name, dtype, shape, bytes, part: summary.part ?? null, figures, path };
  } catch (error) {
    if (!(error instanceof RequestError) || error.status !== 413) throw error;
  }
  // Too large for figures: its first byte comes with its type, shape and size.
  const answer = await fetchRaw(path, { signal, headers: { range: "bytes=0-0" } });
  const shape = (answer.headers.get("x-watchstep-shape") ?? "").split(",").filter(Boolean).map(Number);
  const bytes = Number(answer.headers.get("content-range")?.split("/")[1] ?? 0);
  const dtype = answer.headers.get("x-watchstep-dtype") ?? "";
  return { name, dtype, shape, bytes, part: null, figures: null, path };
}

/** Read a range of a tensor's elements. */
export async function readElements(
  tensor: Pick<SavedTensor, "path" | "dtype">,
  { first, end }: ElementRange,
  signal: AbortSignal,
): Promise<ArrayLike<number>> {
  const size = bytesOf(tensor.dtype);
  if (size === null) throw new RequestError(0, `Data type ${tensor.dtype} cannot be shown here.`);
  const answer = await fetchRaw(tensor.path, {
    signal,
    headers: { range: `bytes=${first * size}-${end * size - 1}` },
  });
  return decode(tensor.dtype, await answer.arrayBuffer());
}
