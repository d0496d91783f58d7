// The status page: polls the server's metrics and slots, and plots tokens per second.

import { get } from "/static/api.js";

const at = (id) => document.getElementById(id);
const EVERY = 1000; // milliseconds between two readings
const MOST = 300; // readings kept
const SHOWN = {
  "num_requests_running": "Requests running",
  "num_requests_waiting": "Requests waiting",
  "kv_cache_usage_perc": "KV cache in use",
  "prompt_tokens_total": "Prompt tokens read",
  "prefix_cache_hits_total": "of which cached",
  "generation_tokens_total": "Tokens written",
  "spec_decode_num_draft_tokens_total": "Draft tokens verified",
  "spec_decode_num_accepted_tokens_total": "of which accepted",
  "prefix_cache_bytes": "Prefix cache",
  "num_preemptions_total": "Replies that left their slot for others",
  "memory_peak_bytes": "Most memory so far",
};
const readings = []; // {time, tokens}

function key() {
  return sessionStorage.getItem("bimetal:key") ?? "";
}

// Prometheus text to {name: sum over labels}, names without the prefix.
export function parsed(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.match(/^bimetal[:_]([a-z0-9_]+)(?:\{[^}]*\})? ([-+0-9.eEinfINFNa]+)$/);
    if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
  }
  return found;
}

function worded(name, value) {
  if (name.endsWith("_bytes")) return `${(value / 2 ** 30).toFixed(2)} GiB`;
  if (name.endsWith("_perc")) return `${(100 * value).toFixed(1)} %`;
  return value.toLocaleString("en");
}

function rates() {
  return readings.slice(1).map(({ time, tokens }, i) => {
    const before = readings[i];
    return { time, rate: (1000 * Math.max(0, tokens - before.tokens)) / (time - before.time) };
  });
}

function plot() {
  const canvas = at("plot"), scale = devicePixelRatio, style = getComputedStyle(canvas);
  const width = (canvas.width = canvas.clientWidth * scale), height = (canvas.height = canvas.clientHeight * scale);
  const drawing = canvas.getContext("2d"), points = rates();
  if (!points.length) return;
  const most = Math.max(1, ...points.map((point) => point.rate)), last = points.at(-1).time;
  drawing.fillStyle = drawing.strokeStyle = style.color;
  drawing.font = `${12 * scale}px system-ui`;
  drawing.fillText(`${most.toFixed(0)} tokens/s`, 6 * scale, 14 * scale);
  drawing.lineWidth = 2 * scale;
  drawing.beginPath();
  for (const { time, rate } of points) {
    drawing.lineTo(width * (1 - (last - time) / (MOST * EVERY)), height - (height - 20 * scale) * (rate / most) - 2 * scale);
  }
  drawing.stroke();
  at("now").textContent = `Now: ${points.at(-1).rate.toFixed(1)} tokens per second`;
}

function showSlots(slots) {
  const rows = slots.map((slot) => {
    const row = document.createElement("tr");
    const state = slot.is_processing ? "running" : "idle";
    const tokens = slot.is_processing ? `${slot.n_past} of ${slot.n_ctx}` : "";
    for (const text of [slot.id, state, tokens]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  at("slots").replaceChildren(...rows);
}

async function turn() {
  try {
    const response = await fetch("/metrics", { headers: key() ? { Authorization: `Bearer ${key()}` } : {} });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const figures = parsed(await response.text());
    readings.push({ time: Date.now(), tokens: figures.generation_tokens_total ?? 0 });
    if (readings.length > MOST) readings.shift();
    plot();
    const entries = Object.entries(SHOWN).filter(([name]) => name in figures);
    at("figures").replaceChildren(
      ...entries.flatMap(([name, title]) => {
        const term = document.createElement("dt"), value = document.createElement("dd");
        term.textContent = title;
        value.textContent = worded(name, figures[name]);
        return [term, value];
      }),
    );
    showSlots(await get("/slots", key()));
    at("notice").hidden = true;
  } catch (error) {
    at("notice").textContent = `No figures: ${error.message}`;
    at("notice").hidden = false;
  }
  setTimeout(turn, EVERY);
}

get("/v1/models", key()).then(
  ({ data: [model] }) => (at("model").textContent = `Status of ${model.id}`),
  () => {},
);
turn();
