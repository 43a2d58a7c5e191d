// The conversation: send, show, stop, regenerate, edit, keep.
import { ServerError, chat } from "./api.js";
import { Announcer } from "./announcer.js";
import { verdict } from "./compare.js";
import { askKey, connect, showStatus, start as startConnection } from "./connection.js";
import * as conversations from "./conversations.js";
import { $, icon, kept, keptInTab, textButton } from "./dom.js";
import * as files from "./files.js";
import { watch } from "./inspect.js";
import * as models from "./models.js";
import { Panel } from "./panels.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { Turn } from "./turn.js";

const field = $("#prompt");
const marks = $("#marks");
const KEEP = 2000; // Milliseconds after which a growing reply is stored again.
let current = empty();
let running = null; // {controller, done}: the turn that is being answered.
let chats; // The panel of conversations.

function empty() {
  return { id: null, title: "", updated: 0, turns: [] };
}

async function ready() {
  return !running && settings.valid() && (models.chosen() !== null || (await connect(current.model))) && !running;
}

async function send() {
  const prompt = field.value.trim();
  if (!(prompt || files.attached()) || !(await ready()) || running) return;
  field.value = "";
  const turn = new Turn(prompt, files.take(), turnActs);
  show(turn);
  current.title ||= conversations.titleOf(prompt || turn.files[0].name);
  await answer(turn);
}

function show(turn) {
  current.turns.push(turn);
  $("#turns").append(turn.element);
  $("#intro").hidden = true;
  atEnd = true;
}

const turnActs = {
  idle: () => !running,
  again: async (turn) => {
    if (!(await ready())) return;
    const attempts = turn.versions.map((tail) => tail?.[0].attempt ?? 0);
    await renew(turn, turn.prompt, Math.max(turn.attempt, ...attempts) + 1, Boolean(turn.text));
  },
  edited: async (turn, prompt) => {
    if (await ready()) await renew(turn, prompt, 0);
  },
  switched: async (turn, version) => {
    const { versions } = turn;
    versions[turn.version] = tail(turn);
    const [first, ...later] = versions[version];
    versions[version] = null;
    drop(current.turns.indexOf(turn));
    for (const saved of [{ ...first, versions, version }, ...later]) show(Turn.restored(saved, turnActs, marks.checked));
    const { element } = current.turns[current.turns.length - 1 - later.length];
    element.querySelector(".versions button:enabled").focus();
    await keep(current);
  },
  continued: async (turn) => {
    if (await ready()) await answer(turn, true);
  },
  raise: settings.showLimit,
};

/** Answers a turn again. `keeping`: the old reply and the turns after it stay as another version. */
async function renew(turn, prompt, attempt, keeping = true) {
  turn.renew(prompt, attempt, keeping ? tail(turn) : null);
  drop(current.turns.indexOf(turn) + 1);
  await answer(turn);
}

/** A turn and the turns after it, without its other versions. */
function tail(turn) {
  const [first, ...later] = current.turns.slice(current.turns.indexOf(turn)).map((one) => one.saved());
  return [{ ...first, versions: undefined, version: undefined }, ...later];
}

/** Removes all turns from this index on. */
function drop(index) {
  for (const turn of current.turns.splice(index)) turn.element.remove();
}

/** The system prompt and the messages up to a turn, without turns that failed before their first text. */
function history(turn, system) {
  const before = current.turns.slice(0, current.turns.indexOf(turn)).filter((other) => other.text);
  const messages = before.flatMap((other) => [["user", asked(other)], ["assistant", other.text]]);
  const first = system ? [["system", system]] : [];
  return [...first, ...messages, ["user", asked(turn)]].map(([role, content]) => ({ role, content }));
}

const asked = ({ prompt, files: attached }) => files.content(prompt, attached);

/** Gets a reply from the server. `more`: continues the existing reply. */
async function answer(turn, more = false) {
  const owner = current;
  const chosen = settings.read();
  const model = models.chosen();
  const { seed, ...sampling } = chosen.sampling;
  const request = { ...sampling, seed: seed + turn.attempt, ...chosen.reasoning };
  const messages = history(turn, chosen.system);
  if (more) messages.push({ role: "assistant", content: turn.text });
  const body = { model: model.id, messages, ...request, ...(more && { continue_final_message: true }) };
  owner.id ??= `${Date.now()}-${Math.random().toString(36).slice(2)}`;
  keptInTab.set("chat", owner.id);
  Object.assign(owner, { model: model.id, system: chosen.system, updated: Date.now() });
  const controller = new AbortController();
  const done = (async () => {
    const asked = keep(owner);
    const timer = setInterval(() => store.put(stored(owner), true).catch(() => {}), KEEP); // The page may be closed meanwhile.
    await fill(turn, body, chosen, { model, more, signal: controller.signal });
    turn.showCuts();
    clearInterval(timer);
    await asked;
    await keep(owner);
  })().finally(() => busy(null));
  busy({ controller, done });
  await done;
}

async function fill(turn, body, { speculation, compare, parallel }, about) {
  if (about.more) {
    turn.replies[0].resume();
    return void (await stream(turn.replies[0], { ...body, speculation }, turn, { ...about, announcer: new Announcer() }));
  }
  turn.clear(compare);
  const drafter = typeof speculation === "string" ? speculation : (speculation.drafter ?? "auto");
  const [temperature, top] = ["temperature", "top_p"].map((name) => effective(name, body, about.model));
  const words = `${body.model}, drafter ${drafter}, temperature ${temperature}, top p ${top}, seed ${body.seed}`;
  const marked = marks.checked || compare;
  const begin = (title) => turn.begin(title, words, marked);
  const on = begin(compare ? `Speculation: ${drafter}` : "Reply");
  const first = stream(on, { ...body, speculation }, turn, { ...about, announcer: new Announcer() });
  if (compare) await compareWithout(turn, on, begin("Speculation off"), { first, body, parallel, about });
  else await first;
}

/** A value of the request, or the model's own. */
const effective = (name, body, model) => body[name] ?? model.paceline?.sampling?.[name] ?? "auto";

/** Sends the same request without speculation, for a second column, and compares the replies. */
async function compareWithout(turn, on, off, { first, body, parallel, about }) {
  // The reply with speculation goes first, because its drafter must not learn from the other one. The second reply finds
  // its prompt in the prefix cache, but this does not matter: the rate does not include the prompt.
  if (!parallel) {
    const notice = off.say("Waiting, so that each reply has the machine to itself.");
    const fine = await first;
    notice.remove();
    if (!fine || about.signal.aborted) return void off.say("Not started, because the other reply did not finish.");
  }
  const done = await Promise.all([first, stream(off, { ...body, speculation: "off" }, turn, about)]);
  if (!done.every(Boolean)) return;
  const result = verdict(on, off, { fair: !parallel, guarantee: models.chosen()?.paceline.guarantee });
  turn.judge(result);
  if (!result.same) for (const reply of [on, off]) reply.differ(result.at);
  new Announcer().say(`${result.head} ${result.rest}`);
  follow();
}

/** Fills a reply from the server; returns false if it failed. */
async function stream(reply, body, turn, { model, more, signal, announcer }) {
  const before = reply.tokens;
  reply.element.classList.add("running");
  const waiting = model.paceline?.loaded === false ? loading(reply, model.id) : () => {};
  try {
    for await (const event of chat(body, signal)) {
      waiting(true);
      reply.read(event.progress);
      reply.update(event);
      announcer?.add(event.content);
    }
    if (reply.finish === "length") end(reply, body, reply.tokens - before);
    if (turn.attempt && effective("temperature", body, model) === 0) reply.say("At temperature 0 every seed gives the same reply.");
    announcer?.end();
    return true;
  } catch (error) {
    if (error.name === "AbortError") reply.say("Stopped.");
    else fail(reply, error, () => answer(turn, more && Boolean(reply.content)));
    return error.name === "AbortError";
  } finally {
    waiting(false);
    reply.read(null);
    reply.done = true;
    await reply.paint();
    reply.element.classList.remove("running");
    follow();
  }
}

/** Shows how long a model has been loading. Returns a function that ends this. Its argument: true if the model is loaded. */
function loading(reply, id) {
  const began = performance.now();
  const line = reply.say("");
  line.setAttribute("role", "status");
  const text = () => `Loading ${id} … ${Math.round((performance.now() - began) / 1000)} s`;
  line.textContent = `Loading ${id} …`;
  const timer = setInterval(() => (line.textContent = text()), 1000);
  return (loaded) => {
    if (!line.isConnected) return;
    clearInterval(timer);
    line.remove();
    if (loaded) connect();
  };
}

/** Shows why a reply was cut off after so many tokens. */
function end(reply, { max_tokens: limit }, tokens) {
  if (tokens >= limit) reply.limit = limit;
  else reply.say("Cut off because the conversation fills the model’s context. Start a new chat.");
}

function fail(reply, error, again) {
  if (error.status === 401) askKey();
  const message = error instanceof ServerError ? error.message : `Something went wrong on this page: ${error.message}`;
  const line = reply.say(error.status === 401 ? "The server requires an API key. Enter it above." : message, "problem");
  line.setAttribute("role", "alert");
  line.after(textButton("Try again", async () => (await ready()) && again()));
}

function busy(turn) {
  running = turn;
  document.body.classList.toggle("busy", Boolean(turn));
  $("#send").hidden = Boolean(turn);
  $("#stop").hidden = !turn;
}

// Keeps the end of the page in view while a reply grows, unless the reader has scrolled up.
let atEnd = true;
let height = 0;
addEventListener("scroll", () => {
  // Only the reader scrolls upwards. A larger distance from the end is not enough, because new text has the same effect.
  const near = scrollY + innerHeight > document.documentElement.scrollHeight - 60;
  atEnd = near || (atEnd && scrollY >= height);
  height = scrollY;
}, { passive: true });
const follow = () => running && atEnd && scrollTo(0, document.documentElement.scrollHeight);
new ResizeObserver(follow).observe($("#turns"));

function stop() {
  running?.controller.abort();
  field.focus();
}

/** Stops the running reply, and waits until its text so far has been stored. */
async function settle() {
  running?.controller.abort();
  await running?.done;
}

const stored = (conversation) => ({ ...conversation, turns: conversation.turns.map((turn) => turn.saved()) });

/** Stores a conversation in this browser, and shows the list. */
async function keep(conversation) {
  try {
    await store.put(stored(conversation));
  } catch (error) {
    showStatus(`This browser could not store the conversation: ${error.message}`);
  }
  await conversations.show(chatActs);
}

async function newChat() {
  await settle();
  current = empty();
  keptInTab.set("chat", "");
  $("#turns").replaceChildren();
  $("#intro").hidden = false;
  chats.leave();
  await conversations.show(chatActs);
  field.focus();
}

const chatActs = {
  current: () => current.id,
  ending: settle,
  removed: newChat,
  open: async (id) => {
    if (!(await load(id))) return;
    chats.leave();
    $("#list [aria-current]")?.focus();
  },
  renamed: async (id, title) => {
    if (id === current.id) current.title = title;
    await store.put({ ...(await store.get(id)), title });
  },
};

/** Shows a stored conversation, or a new one if it was deleted. Returns true if it was found. */
async function load(id) {
  await settle();
  const { turns, ...rest } = (await store.get(id)) ?? empty();
  if (!rest.id) return void (await newChat());
  current = { ...rest, turns: [] };
  keptInTab.set("chat", id);
  $("#turns").replaceChildren();
  for (const turn of turns) show(Turn.restored(turn, turnActs, marks.checked));
  models.choose(rest.model);
  settings.showSystem(rest.system ?? "");
  await conversations.show(chatActs);
  return true;
}

/** Follows changes that other tabs make to the conversations. */
async function changed(id) {
  const idle = !running && !$("#turns .edit");
  await (id === current.id && idle ? load(id) : conversations.show(chatActs));
}

async function start() {
  chats = new Panel($("#chats"), $("#chats-button"), "(min-width: 60rem)");
  settings.start();
  startConnection(() => field.focus());
  models.start();
  $("#chats-button").append(icon("chats"));
  $("#settings-button").append(icon("settings"));
  $("#new").prepend(icon("new"));
  marks.checked = kept.get("marks") === "on";
  document.body.classList.toggle("marked", marks.checked);
  watch($("#turns"));
  files.start();
  conversations.startSearch(chatActs);
  store.watch(changed);
  const last = keptInTab.get("chat");
  if (last) await load(last);
  else conversations.show(chatActs);
  listen();
  connect(current.model);
}

function listen() {
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("keydown", (event) => {
    // Ignore keys that belong to an input method.
    if (event.isComposing) return;
    if (event.key === "Escape") stop();
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    send();
  });
  $("#stop").addEventListener("click", stop);
  $("#new").addEventListener("click", newChat);
  $("#intro .examples").addEventListener("click", ({ target }) => {
    if (!target.matches("button")) return;
    field.value = target.textContent;
    field.focus();
  });
  marks.addEventListener("change", () => {
    kept.set("marks", marks.checked ? "on" : "off");
    document.body.classList.toggle("marked", marks.checked);
    for (const turn of current.turns) turn.mark(marks.checked);
  });
}

start();
