"use strict";
// Shows the values under the pointer or the arrow keys, and switches between heatmaps. The report is readable without it.
const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function decode(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Uint16Array(bytes.buffer);
}

function format(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

function lastAtOrBefore(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function describeLines(chart, x) {
  const [first, last] = chart.span;
  const target = first + x * (last - first);
  const lines = chart.lines.map((line) => {
    let at = lastAtOrBefore(line.step, target);
    if (!line.valid && at + 1 < line.step.length && (at < 0 || line.step[at + 1] - target < target - line.step[at])) at += 1;
    if (at < 0) return `${line.name}: -`;
    const steps = line.last[at] > line.step[at] ? `${line.step[at]} to ${line.last[at]}` : line.step[at];
    const bad = line.bad[at] ? (line.mean[at] === null ? "not finite" : `${format(line.mean[at])}, some not finite`) : format(line.mean[at]);
    return `${line.name}: ${bad} (step ${steps})`;
  });
  return lines.join("\n");
}

function describeCell(chart, x, y) {
  const columns = chart.edges.length - 1, rows = chart.names.length;
  const first = chart.edges[0], last = chart.edges[columns];
  const column = Math.min(columns - 1, Math.max(0, lastAtOrBefore(chart.edges, first + x * (last - first))));
  const row = Math.min(rows - 1, Math.max(0, Math.floor(y * rows)));
  chart.codes ??= decode(chart.cells);
  const code = chart.codes[row * columns + column];
  const share = (code - 2) / 65533, from = chart.low, to = chart.high;
  const value = chart.log ? from * (to / from) ** share : from + (to - from) * share;
  const text = code === 0 ? chart.missing : code === 1 ? "NaN or infinite" : format(value);
  const end = chart.edges[column + 1] - 1;
  const steps = end > chart.edges[column] ? `steps ${chart.edges[column]} to ${end}` : `step ${chart.edges[column]}`;
  return `${chart.names[row]}\n${steps}: ${text}`;
}

for (const plot of document.querySelectorAll(".ws-plot[data-chart]")) {
  const chart = charts[Number(plot.dataset.chart)];
  const cross = document.createElement("div");
  cross.className = "cross";
  cross.hidden = true;
  plot.append(cross);
  plot.tabIndex = 0;
  let x = 1, y = 0;
  const hide = () => { cross.hidden = tip.hidden = true; };
  const show = () => {
    const box = plot.getBoundingClientRect();
    tip.textContent = chart.kind === "heat" ? describeCell(chart, x, y) : describeLines(chart, x);
    tip.hidden = cross.hidden = false;
    cross.style.left = `${x * 100}%`;
    const left = box.left + x * box.width, top = box.top + y * box.height;
    tip.style.left = `${Math.max(4, Math.min(left + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(top + 14, innerHeight - tip.offsetHeight - 8))}px`;
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    y = Math.min(0.999, Math.max(0, (event.clientY - box.top) / box.height));
    show();
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const size = chart.kind === "heat" ? 1 / (chart.edges.length - 1) : 0.01;
    const rows = chart.kind === "heat" ? 1 / chart.names.length : 0;
    const moves = { ArrowLeft: [-size, 0], ArrowRight: [size, 0], ArrowUp: [0, -rows], ArrowDown: [0, rows] };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    x = Math.min(1, Math.max(0, x + moves[event.key][0]));
    y = Math.min(0.999, Math.max(0, y + moves[event.key][1]));
    show();
  });
}

const select = document.getElementById("statistic");
if (select) {
  const panels = [...document.querySelectorAll(".heatmap")];
  const choose = () => panels.forEach((panel, index) => { panel.hidden = index !== select.selectedIndex; });
  select.closest("p").hidden = false;
  select.addEventListener("change", choose);
  choose();
}
