// The conversation: send, show, stop, regenerate, edit, keep.
import { ServerError, chat, keepKey } from "./api.js";
import { Announcer } from "./announcer.js";
import { verdict } from "./compare.js";
import * as conversations from "./conversations.js";
import { $, icon, kept, make } from "./dom.js";
import { watch } from "./inspect.js";
import * as models from "./models.js";
import { Panel } from "./panels.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { Turn } from "./turn.js";

const field = $("#prompt");
const keyForm = $("#key-form");
const marks = $("#marks");
let current = empty();
let running = null; // {controller, done}: the turn that is being answered.
let chats; // The panel of conversations.

function empty() {
  return { id: null, title: "", updated: 0, turns: [] };
}

async function connect() {
  try {
    await models.refresh();
    showStatus(models.chosen() ? "" : "The server has no models.");
    keyForm.hidden = true;
    return Boolean(models.chosen());
  } catch (error) {
    if (error.status === 401) askKey(error);
    else showStatus(error.message);
    return false;
  }
}

function showStatus(text) {
  $("#status").textContent = text;
}

function askKey(error) {
  // No error before the first key was tried.
  $("#key-error").textContent = keyForm.hidden ? "" : error.message;
  keyForm.hidden = false;
  $("#key").focus();
}

async function ready() {
  return !running && settings.valid() && (models.chosen() !== null || (await connect())) && !running;
}

async function send() {
  const prompt = field.value.trim();
  if (!prompt || !(await ready()) || running) return;
  field.value = "";
  const turn = new Turn(prompt, turnActs);
  show(turn);
  current.title ||= conversations.titleOf(prompt);
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
    turn.attempt += 1;
    await rewind(turn);
  },
  edited: async (turn) => {
    if (await ready()) await rewind(turn);
  },
};

/** Answers a turn again, and drops those after it. */
async function rewind(turn) {
  for (const later of current.turns.splice(current.turns.indexOf(turn) + 1)) later.element.remove();
  await answer(turn);
}

/** The system prompt and the messages up to a turn, without turns that failed before their first text. */
function history(turn, system) {
  const before = current.turns.slice(0, current.turns.indexOf(turn)).filter((other) => other.text);
  const messages = before.flatMap(({ prompt, text }) => [["user", prompt], ["assistant", text]]);
  const first = system ? [["system", system]] : [];
  return [...first, ...messages, ["user", turn.prompt]].map(([role, content]) => ({ role, content }));
}

async function answer(turn) {
  const owner = current;
  const chosen = settings.read();
  const model = models.chosen();
  const { seed, ...sampling } = chosen.sampling;
  const request = { ...sampling, seed: seed + turn.attempt, ...chosen.reasoning };
  const body = { model: model.id, messages: history(turn, chosen.system), ...request };
  owner.id ??= `${Date.now()}-${Math.random().toString(36).slice(2)}`;
  Object.assign(owner, { model: model.id, system: chosen.system, updated: Date.now() });
  const controller = new AbortController();
  const done = (async () => {
    const kept = keep(owner);
    await fill(turn, body, chosen, { model, signal: controller.signal });
    await kept;
    await keep(owner);
  })().finally(() => busy(null));
  busy({ controller, done });
  await done;
}

async function fill(turn, body, { speculation, compare, parallel }, about) {
  turn.clear(compare);
  const drafter = typeof speculation === "string" ? speculation : (speculation.drafter ?? "auto");
  const words = `${body.model}, drafter ${drafter}, temperature ${body.temperature}, top p ${body.top_p}, seed ${body.seed}`;
  const marked = marks.checked || compare;
  const begin = (title) => turn.begin(title, words, marked);
  const on = begin(compare ? `Speculation: ${drafter}` : "Reply");
  const first = stream(on, { ...body, speculation }, turn, { ...about, announcer: new Announcer() });
  if (compare) await compareWithout(turn, on, begin("Speculation off"), { first, body, parallel, about });
  else await first;
}

/** Sends the same request without speculation, for a second column, and compares the replies. */
async function compareWithout(turn, on, off, { first, body, parallel, about }) {
  // The reply with speculation goes first, because its drafter must not learn from the other one. That the second finds
  // its prompt in the prefix cache does not matter: the rate does not include the prompt.
  if (!parallel) {
    const notice = off.say("Waiting, so that each reply has the machine to itself.");
    const fine = await first;
    notice.remove();
    if (!fine || about.signal.aborted) return void off.say("Not started: the other reply did not finish.");
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
async function stream(reply, body, turn, { model, signal, announcer }) {
  reply.element.classList.add("running");
  const waiting = model.paceline?.loaded === false ? loading(reply, model.id) : () => {};
  try {
    for await (const event of chat(body, signal)) {
      waiting(true);
      reply.update(event);
      announcer?.add(event.content);
    }
    if (reply.finish === "length") reply.say("Stopped at the token limit.");
    if (turn.attempt && !body.temperature) reply.say("At temperature 0 every seed gives the same reply.");
    announcer?.end();
    return true;
  } catch (error) {
    if (error.name === "AbortError") reply.say("Stopped.");
    else fail(reply, turn, error);
    return error.name === "AbortError";
  } finally {
    waiting(false);
    reply.done = true;
    await reply.paint();
    reply.element.classList.remove("running");
    follow();
  }
}

/** Says for how long a model has been loading; returns a function that ends it, called with whether it is loaded. */
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

function fail(reply, turn, error) {
  if (error.status === 401) askKey(error);
  const line = reply.say(error instanceof ServerError ? error.message : `The page failed: ${error.message}`, "problem");
  line.setAttribute("role", "alert");
  const again = make("button", "", "Try again");
  again.addEventListener("click", async () => (await ready()) && answer(turn));
  line.after(again);
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
  // Only a move upwards is the reader's: new text since the last scroll moves the end of the page away, too.
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

/** Stops the running reply, and waits until what there is of it is kept. */
async function settle() {
  running?.controller.abort();
  await running?.done;
}

/** Keeps a conversation in this browser, and shows the list. */
async function keep(conversation) {
  try {
    await store.put({ ...conversation, turns: conversation.turns.map((turn) => turn.saved()) });
  } catch (error) {
    showStatus(`This browser does not keep the conversation: ${error.message}`);
  }
  await conversations.show(chatActs);
}

async function newChat() {
  await settle();
  current = empty();
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
    await settle();
    const { turns, ...rest } = (await store.get(id)) ?? empty();
    if (!rest.id) return void (await newChat());
    current = { ...rest, turns: [] };
    $("#turns").replaceChildren();
    for (const turn of turns) show(Turn.restored(turn, turnActs, marks.checked));
    models.choose(rest.model);
    settings.showSystem(rest.system ?? "");
    chats.leave();
    await conversations.show(chatActs);
    $("#list [aria-current]")?.focus();
  },
  renamed: async (id, title) => {
    if (id === current.id) current.title = title;
    await store.put({ ...(await store.get(id)), title });
  },
};

function start() {
  chats = new Panel($("#chats"), $("#chats-button"), "(min-width: 60rem)");
  settings.start();
  models.start();
  $("#chats-button").append(icon("chats"));
  $("#settings-button").append(icon("settings"));
  $("#new").prepend(icon("new"));
  marks.checked = kept.get("marks") === "on";
  document.body.classList.toggle("marked", marks.checked);
  watch($("#turns"));
  listen();
  connect();
  conversations.show(chatActs);
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
  keyForm.addEventListener("submit", async (event) => {
    event.preventDefault();
    keepKey($("#key").value);
    $("#key").value = "";
    if (await connect()) field.focus();
  });
}

start();
