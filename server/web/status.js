"use strict";
// The server's /status as a table, asked for again every two seconds while somebody looks.

const $ = (id) => document.getElementById(id);
const UNITS = { uptime_s: "s", max_model_len: "tokens", kv_pages: "pages", kv_pages_free: "pages" };
let before = null;

function row(name, value) {
  const made = document.createElement("tr");
  const head = document.createElement("th");
  const cell = document.createElement("td");
  head.scope = "row";
  head.textContent = name.replace(/_s$/, "").replaceAll("_", " ");
  cell.textContent = UNITS[name] ? `${value} ${UNITS[name]}` : String(value);
  made.append(head, cell);
  return made;
}

async function refresh() {
  const key = $("key").value;
  try {
    const response = await fetch("/status", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
    $("locked").hidden = response.status !== 401 && !key;
    const status = await response.json();
    if (!response.ok) throw new Error(status.error.message);
    const now = performance.now();
    const written = status.generation_tokens_total;
    const speed = before && (1000 * (written - before.written)) / (now - before.now);
    before = { now, written };
    $("model").textContent = status.model;
    $("phase").textContent = status.phase;
    $("rows").replaceChildren(
      ...Object.entries(status).map(([name, value]) => row(name, value)),
      row("tokens written per second, all requests", speed === null ? "…" : speed.toFixed(1)),
    );
  } catch (error) {
    $("phase").textContent = error.message;
  }
}

$("key").addEventListener("change", refresh);
refresh();
setInterval(() => { if (!document.hidden) refresh(); }, 2000);
