// The chat page: what is shown, and what the buttons do.

import { chat, get } from "/static/api.js";
import { article, drawn } from "/static/messages.js";
import { blank, exported, imported, read, titled, write } from "/static/store.js";

const at = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FEW = 4; // tokens of a reply, of which no speed is shown
const view = at("messages");

const state = {
  conversations: read("conversations", []),
  current: null,
  settings: read("settings", {}),
  context: 0,
  model: "",
  running: null, // an AbortController while a reply is written
};

function save() {
  state.conversations.sort((a, b) => b.changed - a.changed);
  const room = write("conversations", state.conversations) && write("settings", state.settings);
  notice(room ? "" : "The browser's storage is full: export your conversations and delete some.");
}

function notice(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function key() {
  return sessionStorage.getItem("bimetal:key") ?? "";
}

// -- what is shown -----------------------------------------------------------

function showList() {
  const items = state.conversations.map((conversation) => {
    const item = document.createElement("li");
    const open = document.createElement("button");
    const remove = document.createElement("button");
    open.textContent = titled(conversation);
    open.title = open.textContent;
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete ${open.textContent}`);
    item.setAttribute("aria-current", String(conversation === state.current));
    open.onclick = () => show(conversation);
    remove.onclick = () => {
      if (!confirm(`Delete “${titled(conversation)}”?`)) return;
      state.conversations = state.conversations.filter((other) => other !== conversation);
      save();
      show(state.current === conversation ? state.conversations[0] : state.current);
    };
    item.append(open, remove);
    return item;
  });
  at("list").replaceChildren(...items);
}

function show(conversation) {
  stop();
  state.current = conversation ?? blank();
  at("side").classList.remove("open");
  showList();
  showMessages();
}

function showMessages() {
  const { messages } = state.current;
  const empty = document.createElement("p");
  empty.className = "empty";
  empty.textContent = "What is on your mind?";
  view.replaceChildren(...(messages.length ? messages.map((message, i) => article(message, i)) : [empty]));
  view.scrollTop = view.scrollHeight;
  const last = messages.findLast((message) => message.figures)?.figures;
  showFigures(last);
}

function showFigures(figures) {
  const used = figures ? figures.prompt + figures.reply : 0;
  at("context").value = state.context ? used / state.context : 0;
  at("context-text").textContent = state.context ? `${used} / ${state.context}` : "";
  if (!figures) return (at("figures").textContent = "");
  const parts = [`${figures.reply} ${figures.reply === 1 ? "token" : "tokens"}`];
  if (figures.reply > FEW) parts.push(`${figures.speed.toFixed(1)} tokens/s`);
  if (figures.cached) parts.push(`${figures.cached} of ${figures.prompt} prompt tokens from the cache`);
  if (figures.drafted) parts.push(`${Math.round((100 * figures.accepted) / figures.drafted)} % of the draft's tokens accepted`);
  at("figures").textContent = parts.join(" · ");
}

// -- a reply -----------------------------------------------------------------

function stop() {
  state.running?.abort();
}

function request(messages) {
  const { system, ...numbers } = state.settings;
  const sent = messages.map(({ role, content }) => ({ role, content }));
  return { messages: system ? [{ role: "system", content: system }, ...sent] : sent, ...numbers };
}

async function reply() {
  const conversation = state.current;
  const message = { role: "assistant", content: "" };
  const body = request(conversation.messages);
  conversation.messages.push(message);
  conversation.changed = Date.now();
  if (!state.conversations.includes(conversation)) state.conversations.push(conversation);
  save();
  showList();
  showMessages();
  const shown = view.lastElementChild;
  shown.setAttribute("aria-busy", "true");
  const running = (state.running = new AbortController());
  at("send").hidden = true;
  at("stop").hidden = false;
  let due = false;
  const draw = () => {
    due = false;
    const follows = view.scrollHeight - view.scrollTop - view.clientHeight < 80;
    drawn(shown, message);
    if (follows) view.scrollTop = view.scrollHeight;
  };
  try {
    const end = await chat(body, key(), running.signal, ({ text, reasoning }) => {
      message.content += text;
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      if (!due) requestAnimationFrame(draw);
      due = true;
    });
    message.figures = figuresOf(end);
    if (end.reason === "length") notice("The reply ended because it reached the most tokens.");
  } catch (error) {
    if (error.name !== "AbortError") notice(`No reply: ${error.message}`);
    if (!message.content && !message.reasoning) conversation.messages.pop();
  }
  if (state.running === running) state.running = null;
  at("send").hidden = false;
  at("stop").hidden = true;
  write("conversations", state.conversations);
  if (state.current === conversation) showMessages();
}

function figuresOf({ usage, timings }) {
  return {
    prompt: usage?.prompt_tokens ?? 0,
    reply: usage?.completion_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    speed: timings?.predicted_per_second ?? 0,
    drafted: timings?.draft_n ?? 0,
    accepted: timings?.draft_n_accepted ?? 0,
  };
}

async function send(text) {
  if (state.running || !text.trim()) return;
  notice("");
  state.current.messages.push({ role: "user", content: text });
  await reply();
}

// -- buttons of messages -----------------------------------------------------

const actions = {
  "copy-code": (button) => copy(button, button.parentElement.querySelector("code").textContent),
  copy: (button, i) => copy(button, state.current.messages[i].content),
  regenerate: (_, i) => {
    if (state.running) return;
    state.current.messages.length = i;
    reply();
  },
  edit: (_, i) => {
    if (state.running) return;
    const box = document.createElement("textarea");
    box.value = state.current.messages[i].content;
    box.rows = Math.min(12, box.value.split("\n").length + 1);
    box.setAttribute("aria-label", "Edit the message; Enter sends it, Escape keeps it as it was");
    box.onkeydown = (event) => {
      if (event.key === "Escape") showMessages();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      state.current.messages.length = i;
      send(box.value);
    };
    view.children[i].querySelector(".body").replaceWith(box);
    box.focus();
  },
};

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying is not allowed here";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

view.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) actions[button.dataset.action](button, Number(button.closest("article").dataset.index));
});

// -- the form, the list, the settings ----------------------------------------

const input = at("input");

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.running && !at("settings").open) stop();
});
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.running || !input.value.trim()) return;
  const text = input.value;
  input.value = "";
  fit();
  send(text);
});
at("stop").onclick = stop;
at("new").onclick = () => {
  show();
  input.focus();
};
at("open-side").onclick = () => at("side").classList.add("open");
at("close-side").onclick = () => at("side").classList.remove("open");

at("export").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([exported(state.conversations)], { type: "application/json" }));
  link.download = "bimetal-conversations.json";
  link.click();
  URL.revokeObjectURL(link.href);
};
at("import").onclick = () => at("file").click();
at("file").onchange = async () => {
  const [file] = at("file").files;
  if (!file) return;
  try {
    state.conversations.push(...imported(await file.text()));
    save();
    showList();
  } catch (error) {
    notice(`${file.name} was not imported: ${error.message}`);
  }
  at("file").value = "";
};

at("open-settings").onclick = () => {
  at("system").value = state.settings.system ?? "";
  for (const name of NUMBERS) at(name).value = state.settings[name] ?? "";
  at("key").value = key();
  at("settings").showModal();
};
at("settings").addEventListener("close", () => {
  const settings = {};
  if (at("system").value.trim()) settings.system = at("system").value;
  for (const name of NUMBERS) {
    const value = at(name).valueAsNumber;
    if (Number.isFinite(value)) settings[name] = value;
  }
  state.settings = settings;
  sessionStorage.setItem("bimetal:key", at("key").value);
  save();
  begin();
});

async function begin() {
  try {
    const [model] = (await get("/v1/models", key())).data;
    state.model = model.id;
    state.context = model.max_model_len ?? model.context_length ?? 0;
    at("model").textContent = state.model;
    document.title = `${state.model} · bimetal`;
    notice("");
  } catch (error) {
    notice(`The model list could not be read: ${error.message}`);
  }
  showFigures(state.current.messages.findLast((message) => message.figures)?.figures);
}

show(state.conversations[0]);
begin();
