"use strict";
// A chat over this server's own /v1/chat/completions. Texts from the model are only ever set as
// text, never as HTML.

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const GAUGES = {
  requests_running: "requests running",
  requests_waiting: "requests waiting",
  kv_used: "KV pages in use",
  generation_tokens_total: "tokens written",
  prompt_tokens_total: "prompt tokens read",
  preemptions_total: "preemptions",
  tokens_per_s: "tokens/s, all requests",
};

let messages = load("treadle.messages", []);
let running = null;
let before = null;

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save() {
  try {
    localStorage.setItem("treadle.messages", JSON.stringify(messages));
    const kept = {};
    for (const field of $("settings").elements) kept[field.name] = field.value;
    delete kept.key; // a key is not written to disk
    localStorage.setItem("treadle.settings", JSON.stringify(kept));
  } catch {
    // storage that is full or forbidden: the page works, and forgets
  }
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = $("settings").elements.key.value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// --- showing ---------------------------------------------------------------------------------

function fold(title, text, open) {
  const details = element("details");
  details.open = open;
  details.append(element("summary", "", title), element("div", "text", text));
  return details;
}

function fill(item, message, isOpen) {
  item.className = message.role;
  const wasOpen = item.querySelector("details")?.open;
  item.replaceChildren();
  if (message.reasoning_content) {
    item.append(fold("reasoning", message.reasoning_content, wasOpen ?? (isOpen && !message.content)));
  }
  if (message.content) item.append(element("div", "text", message.content));
  for (const call of message.tool_calls ?? []) {
    const shown = element("details", "call");
    shown.open = true;
    shown.append(element("summary", "", `calls ${call.function.name}`));
    shown.append(element("pre", "", call.function.arguments));
    item.append(shown);
  }
  if (message.error) item.append(element("div", "error", message.error));
  if (message.note) item.append(element("div", "note", message.note));
}

function show() {
  $("messages").replaceChildren(
    ...messages.map((message) => {
      const item = element("li");
      fill(item, message, false);
      return item;
    }),
  );
  $("messages").scrollTop = $("messages").scrollHeight;
}

// --- asking ----------------------------------------------------------------------------------

function body() {
  const fields = $("settings").elements;
  const asked = { stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (fields[name].value !== "") asked[name] = Number(fields[name].value);
  if (fields.stop.value) asked.stop = fields.stop.value;
  if (fields.tools.value.trim()) asked.tools = JSON.parse(fields.tools.value);
  const turns = messages
    .filter((message) => !message.error && (message.content || message.tool_calls))
    .map(({ role, content, tool_calls }) => ({ role, content, ...(tool_calls && { tool_calls }) }));
  const system = fields.system.value.trim();
  asked.messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  return JSON.stringify(asked);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

function add(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) {
    message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  }
  for (const part of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = message.tool_calls[part.index];
    if (call) call.function.arguments += part.function.arguments;
    else {
      const { id, type } = part;
      message.tool_calls[part.index] = { id, type, function: { ...part.function } };
    }
  }
}

async function ask() {
  const message = { role: "assistant", content: "" };
  const began = performance.now();
  let first = 0, chunks = 0, usage = null;
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const item = element("li", "assistant");
  const list = $("messages");
  try {
    const sent = body();
    messages.push(message);
    list.append(item);
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: sent,
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (!first) first = performance.now();
      chunks += 1;
      add(message, choice.delta);
      if (choice.finish_reason === "length") message.note = "cut off: the limit of tokens is reached";
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
      fill(item, message, true);
      if (atEnd) list.scrollTop = list.scrollHeight;
      tell(began, first, usage?.completion_tokens ?? chunks);
    }
    tell(began, first, usage?.completion_tokens ?? chunks);
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else message.error = error.message;
  } finally {
    running = null;
    if (!messages.includes(message)) messages.push(message);
    $("send").hidden = false;
    $("stop").hidden = true;
    save();
    show();
    $("text").focus();
  }
}

function tell(began, first, tokens) {
  const now = performance.now();
  const seconds = (now - first) / 1000;
  const speed = seconds > 0 && tokens > 1 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s, ` : "";
  $("speed").textContent = `${tokens} tokens, ${speed}first after ${((first - began) / 1000).toFixed(2)} s`;
}

// --- gauges ----------------------------------------------------------------------------------

async function refresh() {
  try {
    const response = await fetch("/status", { headers: headers() });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const status = await response.json();
    $("model").textContent = status.model;
    $("phase").textContent = status.ready ? "" : status.phase;
    $("report").hidden = !status.has_report;
    const now = performance.now();
    status.kv_used = `${status.kv_pages - status.kv_pages_free} of ${status.kv_pages}`;
    if (before) {
      const tokens = status.generation_tokens_total - before.tokens;
      status.tokens_per_s = ((1000 * tokens) / (now - before.at)).toFixed(1);
    }
    before = { tokens: status.generation_tokens_total, at: now };
    $("gauges").replaceChildren(
      ...Object.entries(GAUGES).flatMap(([name, title]) => [
        element("dt", "", title),
        element("dd", "", String(status[name] ?? "…")),
      ]),
    );
  } catch (error) {
    $("phase").textContent = error.message;
  }
}

// --- wiring ----------------------------------------------------------------------------------

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  $("text").value = "";
  save();
  show();
  ask();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("compose").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  save();
  show();
  $("speed").textContent = "";
  $("text").focus();
});
$("settings").addEventListener("input", save);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("toggle").addEventListener("click", () => {
  const isOpen = $("side").classList.toggle("open");
  $("toggle").setAttribute("aria-expanded", String(isOpen));
});

for (const [name, value] of Object.entries(load("treadle.settings", {}))) {
  const field = $("settings").elements[name];
  if (field) field.value = value;
}
show();
refresh();
setInterval(() => { if (!document.hidden) refresh(); }, 2000);
