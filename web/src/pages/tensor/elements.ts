// Elements of saved tensors, from the bytes of the service: little-endian, in the data types of safetensors.

type Reader = (bytes: ArrayBuffer) => ArrayLike<number>;

interface ElementType {
  /** Bytes of an element. */
  bytes: number;
  read: Reader;
}

/** Return the numbers of a narrow format by a table of all its bit patterns. */
function byTable(bits: 8 | 16, value: (pattern: number) => number): Reader {
  let table: Float32Array | null = null;
  return (bytes) => {
    table ??= Float32Array.from({ length: 2 ** bits }, (_, pattern) => value(pattern));
    const patterns = bits === 8 ? new Uint8Array(bytes) : new Uint16Array(bytes);
    const values = new Float32Array(patterns.length);
    for (let index = 0; index < patterns.length; index += 1) values[index] = table[patterns[index]!]!;
    return values;
  };
}

/** IEEE 754 binary16. */
function half(pattern: number): number {
  const sign = pattern & 0x8000 ? -1 : 1;
  const exponent = (pattern >> 10) & 31;
  const fraction = pattern & 1023;
  if (exponent === 31) return fraction === 0 ? sign * Infinity : NaN;
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25));
}

/** OCP FP8 E4M3: no infinity; NaN where all bits but the sign are set. */
function e4m3(pattern: number): number {
  const sign = pattern & 128 ? -1 : 1;
  const exponent = (pattern >> 3) & 15;
  const fraction = pattern & 7;
  if ((pattern & 127) === 127) return NaN;
  return sign * (exponent === 0 ? fraction * 2 ** -9 : (8 + fraction) * 2 ** (exponent - 10));
}

const bfloat16: Reader = (bytes) => {
  const halves = new Uint16Array(bytes);
  const words = new Uint32Array(halves.length);
  for (let index = 0; index < halves.length; index += 1) words[index] = halves[index]! << 16;
  return new Float32Array(words.buffer);
};

/** Magnitudes of complex numbers, whose parts follow each other. */
const complexMagnitudes: Reader = (bytes) => {
  const parts = new Float32Array(bytes);
  return Float64Array.from({ length: parts.length / 2 }, (_, index) =>
    Math.hypot(parts[2 * index]!, parts[2 * index + 1]!),
  );
};

const TYPES: Record<string, ElementType> = {
  BOOL: { bytes: 1, read: (bytes) => new Uint8Array(bytes) },
  U8: { bytes: 1, read: (bytes) => new Uint8Array(bytes) },
  I8: { bytes: 1, read: (bytes) => new Int8Array(bytes) },
  U16: { bytes: 2, read: (bytes) => new Uint16Array(bytes) },
  I16: { bytes: 2, read: (bytes) => new Int16Array(bytes) },
  U32: { bytes: 4, read: (bytes) => new Uint32Array(bytes) },
  I32: { bytes: 4, read: (bytes) => new Int32Array(bytes) },
  U64: { bytes: 8, read: (bytes) => Float64Array.from(new BigUint64Array(bytes), Number) },
  I64: { bytes: 8, read: (bytes) => Float64Array.from(new BigInt64Array(bytes), Number) },
  F16: { bytes: 2, read: byTable(16, half) },
  BF16: { bytes: 2, read: bfloat16 },
  F32: { bytes: 4, read: (bytes) => new Float32Array(bytes) },
  F64: { bytes: 8, read: (bytes) => new Float64Array(bytes) },
  F8_E4M3: { bytes: 1, read: byTable(8, e4m3) },
  F8_E5M2: { bytes: 1, read: byTable(8, (pattern) => half(pattern << 8)) },
  F8_E8M0: { bytes: 1, read: byTable(8, (pattern) => (pattern === 255 ? NaN : 2 ** (pattern - 127))) },
  C64: { bytes: 8, read: complexMagnitudes },
};

/** Return the bytes of an element; null if the page cannot read the data type. */
export function bytesOf(dtype: string): number | null {
  return TYPES[dtype]?.bytes ?? null;
}

/** Return the elements in bytes; complex numbers by their magnitude. The length must be a multiple of the element's bytes. */
export function decode(dtype: string, bytes: ArrayBuffer): ArrayLike<number> {
  const type = TYPES[dtype];
  if (type === undefined) throw new Error(`data type ${dtype}: cannot be shown here`);
  return type.read(bytes);
}

/** Return the index of an element from its place in row-major order. */
export function unravel(place: number, shape: readonly number[]): number[] {
  const index = shape.map(() => 0);
  for (let dimension = shape.length - 1; dimension >= 0; dimension -= 1) {
    index[dimension] = place % shape[dimension]!;
    place = Math.floor(place / shape[dimension]!);
  }
  return index;
}
