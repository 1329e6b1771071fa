/** Names of what the recorder itself measures, in words with units. Other names are the program's, and stay. */
const WORDS = new Map(
  Object.entries({
    "gradients:nonfinite_applied": "Updates that applied NaN or infinite gradients (1: yes)",
    "updates:missing": "Steps in a row without a finite update",
    "updates:skipped": "Updates that the gate policy left out (1: yes)",
    "weights:loaded": "Weights that the program loaded (1: yes)",
    "gradient_scaler:scale": "Scale of the loss",
    "gradient_scaler:skipped": "Updates that the gradient scaler skipped (1: yes)",
    "system/cpu": "Processor time of the process, share of its CPUs",
    "system/cpus": "CPUs that the process may use",
    "system/memory": "Memory of the process, bytes",
    "system/memory_private": "Private memory of the process, bytes",
    "system/data_workers": "Processes that load data",
    "system/step_seconds": "Time of a step, seconds",
    "system/data_wait": "Share of a step before its forward pass",
    "system/initialization_seconds": "Time until the first update, seconds",
    "system/node_cpu": "Busy CPUs of the machine, share",
    "system/node_memory": "Used memory of the machine, share",
    "system/node_iowait": "CPUs of the machine that wait for disks, share",
    "system/node_io_stall": "Time in which a task waits for disks, share",
    "system/node_disk_read": "Read from disks, bytes a second",
    "system/node_disk_written": "Written to disks, bytes a second",
    "system/node_network_received": "Received from the network, bytes a second",
    "system/node_network_sent": "Sent to the network, bytes a second",
  }),
);

/** The name of a metric for people: `Time of a step, seconds`. A prefix is the name of one of several models. */
export function wordsOf(name: string): string {
  const own = WORDS.get(name);
  if (own !== undefined) return own;
  const gpu = /^system\/gpu_(\d+)(_memory)?$/.exec(name);
  if (gpu !== null)
    return `GPU ${gpu[1]}, ${gpu[2] === undefined ? "time in which it computes" : "used memory"}, share`;
  const dot = name.lastIndexOf(".");
  const inner = dot < 0 ? undefined : WORDS.get(name.slice(dot + 1));
  return inner === undefined ? name : `${inner}, ${name.slice(0, dot)}`;
}
