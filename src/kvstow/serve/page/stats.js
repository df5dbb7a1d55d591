// Shows the statistics, once a second while the page can be seen.
import { Refused, call } from "./server.js";

const EVERY_MS = 1000;
const TOO_LONG_MS = 5000;
const SAMPLES = 60;
const OLD_S = 3;

const $ = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
const UNITS = ["B", "kB", "MB", "GB", "TB"];
const history = new Map();
let onRefused = () => {};
let timer;
let shownLayers = "";

const show = {
  text: String,
  count: (n) => count.format(n),
  rate: (n) => (n >= 100 ? count.format(n) : n.toFixed(1)),
  bytes(n) {
    let i = 0;
    while (n >= 1000 && i < UNITS.length - 1) [n, i] = [n / 1000, i + 1];
    return `${i ? three.format(n) : n}\u00a0${UNITS[i]}`;
  },
};

export function start(refused) {
  onRefused = refused;
  document.addEventListener("visibilitychange", poll);
  poll();
}

export async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const response = await call("v1/kvstow/stats", { signal: AbortSignal.timeout(TOO_LONG_MS) });
    render(await response.json());
    $("stats").classList.remove("stale");
  } catch (error) {
    $("stats").classList.add("stale");
    if (error instanceof Refused) {
      state("refused", error.status === 401 ? "needs an API key" : error.message);
      onRefused(error);
      if (error.status === 401) return; // until there is another key
    } else {
      state("unavailable", "the server does not answer");
    }
  }
  clearTimeout(timer); // of a poll that ran at the same time
  timer = setTimeout(poll, EVERY_MS);
}

function render(stats) {
  for (const element of document.querySelectorAll("[data-field]")) {
    const value = element.dataset.field.split(".").reduce((at, name) => at?.[name], stats);
    if (element instanceof SVGElement) spark(element, value);
    else if (value !== null && value !== undefined) {
      element.textContent = show[element.dataset.as ?? "text"](value);
    }
  }
  state(stats.state, stats.state);
  $("uptime").textContent = `up ${lasted(stats.uptime_s)}`;
  document.title = `${stats.model} · kvstow`;
  memory(stats);
  refusals(stats.requests.refused);
  layers(stats.layers);
  list($("kernels"), stats.kernels.map((k) => [k.kernel, k.passed ? "passed its check" : k.why]));
  list($("attention-calls"), Object.entries(stats.attention_calls)
    .map(([by, n]) => [`attention: ${by}`, show.count(n)]));
  const { disk_writes, disk_dropped, disk_errors } = stats.prefixes;
  $("disk").hidden = !(disk_writes + disk_dropped + disk_errors);
  $("versions").textContent = Object.entries(stats.versions)
    .map(([name, version]) => `${name} ${version ?? "?"}`).join(" · ");
}

function state(name, text) {
  $("state").className = `state ${name}`;
  const span = $("state").lastElementChild;
  if (span.textContent !== text) span.textContent = text; // screen readers say what changes
}

function memory({ memory, budget, measured_s_ago }) {
  const { held, in_flight, prefixes } = memory;
  const width = (id, bytes, all) => {
    $(id).style.width = `${all ? Math.min(100, (100 * bytes) / all) : 0}%`;
  };
  const all = Math.max(held.kv_bytes_bf16, held.kv_bytes);
  width("bar-in-flight", in_flight.kv_bytes, all);
  width("bar-kept", prefixes.kv_bytes, all);
  width("bar-bf16", held.kv_bytes_bf16, all);
  const ratio = held.compression_ratio;
  $("smaller").textContent = held.kv_bytes ? `${(ratio < 1 ? 1 / ratio : ratio).toFixed(2)}×` : "–";
  $("smaller-text").textContent = held.kv_bytes
    ? `${ratio < 1 ? "larger" : "smaller"} than bf16, ${show.count(held.tokens)} tokens held`
    : "nothing is held";
  width("bar-budget", budget.reserved_bytes, budget.total_bytes);
  $("nonfinite").hidden = !memory.nonfinite_groups;
  $("age").hidden = !(measured_s_ago > OLD_S);
}

function refusals(refused) {
  const all = Object.values(refused).reduce((sum, n) => sum + n, 0);
  $("refused").textContent = all ? `${show.count(all)} refused` : "none refused";
  list($("reasons"), Object.entries(refused).map(([why, n]) => [why.replaceAll("_", " "), show.count(n)]));
}

function layers({ total, quantised, by_path, each }) {
  if (!total) return;
  const paths = Object.entries(by_path).map(([path, n]) => `${n} ${path}`).join(", ");
  $("layers-summary").textContent = `${quantised} of ${total} quantised; attention ${paths}`;
  const now = JSON.stringify(each);
  if (now === shownLayers) return;
  shownLayers = now;
  $("layers-rows").replaceChildren(...each.map((layer) => {
    const row = document.createElement("tr");
    const why = [layer.reason, layer.path_reason].filter(Boolean).join("; ");
    for (const text of [layer.index, layer.kind, layer.scheme, layer.path, why]) {
      row.insertCell().textContent = text;
    }
    return row;
  }));
}

function list(element, pairs) {
  element.replaceChildren(...pairs.map((pair) => {
    const item = document.createElement("li");
    for (const text of pair) item.appendChild(document.createElement("span")).textContent = text;
    return item;
  }));
}

function spark(svg, value) {
  const name = svg.dataset.field;
  const values = [...(history.get(name) ?? []), value].slice(-SAMPLES);
  history.set(name, values);
  const top = Math.max(...values, 1);
  const points = values.map((v, i) => {
    const x = 120 - ((values.length - 1 - i) * 120) / (SAMPLES - 1);
    return `${x.toFixed(1)},${(31 - (29 * v) / top).toFixed(1)}`;
  });
  svg.querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  const from = points[0].split(",")[0];
  svg.querySelector(".area").setAttribute("d", `M${from},32L${points.join("L")}L120,32Z`);
}

function lasted(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
