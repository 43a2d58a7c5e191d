// The conversation: send, show, stop, retry.
import { ServerError, chat, keepKey, model as fetchModel } from "./api.js";
import { Announcer } from "./announcer.js";
import { verdict } from "./compare.js";
import { $, make } from "./dom.js";
import { watch } from "./inspect.js";
import { Reply } from "./reply.js";
import * as settings from "./settings.js";

const field = $("#prompt");
const keyForm = $("#key-form");
let turns = [];
let model = null;
let running = null; // The AbortController of the running turn.

async function connect() {
  try {
    model = await fetchModel();
    showStatus(model.id);
    settings.offer(model);
    keyForm.hidden = true;
    return true;
  } catch (error) {
    if (error.status === 401) askKey(error);
    else showStatus(error.message, true);
    return false;
  }
}

function showStatus(text, problem = false) {
  $("#model").textContent = text;
  $("#model").classList.toggle("problem", problem);
}

function askKey(error) {
  // No error before the first key was tried.
  $("#key-error").textContent = keyForm.hidden ? "" : error.message;
  keyForm.hidden = false;
  $("#key").focus();
}

async function send() {
  const prompt = field.value.trim();
  if (!prompt || running || !settings.valid()) return;
  if (!model && (!(await connect()) || running)) return;
  field.value = "";
  const message = make("div", "message", make("h3", "hidden", "You"), make("p", "", prompt));
  const turn = { prompt, text: "", replies: make("div", "replies") };
  turn.element = make("section", "turn", message, turn.replies);
  turns.push(turn);
  $("#turns").append(turn.element);
  $("#intro").hidden = true;
  atEnd = true;
  follow();
  await answer(turn);
}

/** The messages up to a turn, without turns that failed before their first text. */
function history(turn) {
  const before = turns.slice(0, turns.indexOf(turn)).filter((other) => other.text);
  const messages = before.flatMap(({ prompt, text }) => [["user", prompt], ["assistant", text]]);
  return [...messages, ["user", turn.prompt]].map(([role, content]) => ({ role, content }));
}

async function answer(turn) {
  const chosen = settings.read();
  const body = { model: model.id, messages: history(turn), ...chosen.sampling };
  busy(new AbortController());
  try {
    await fill(turn, body, chosen);
  } finally {
    busy(null);
  }
}

async function fill(turn, body, { speculation, compare, parallel }) {
  turn.replies.replaceChildren();
  turn.replies.classList.toggle("pair", compare);
  const drafter = typeof speculation === "string" ? speculation : (speculation.drafter ?? "auto");
  const scale = { max: 4 };
  const on = column(turn, compare ? `Speculation: ${drafter}` : "Reply", scale);
  const first = stream(on, { ...body, speculation }, turn, new Announcer());
  if (compare) await compareWithout(turn, on, column(turn, "Speculation off", scale), first, body, parallel);
  else await first;
  turn.text = on.content;
}

function column(turn, title, scale) {
  const reply = new Reply(title, scale);
  turn.replies.append(reply.element);
  return reply;
}

/** Sends the same request without speculation, for a second column, and compares the replies. */
async function compareWithout(turn, on, off, first, body, parallel) {
  // The reply with speculation goes first, because its drafter must not learn from the other one. That the second finds
  // its prompt in the prefix cache does not matter: the rate does not include the prompt.
  if (!parallel) {
    const notice = off.say("Waiting, so that each reply has the machine to itself.");
    const fine = await first;
    notice.remove();
    if (!fine || running.signal.aborted) return void off.say("Not started: the other reply did not finish.");
  }
  const done = await Promise.all([first, stream(off, { ...body, speculation: "off" }, turn)]);
  if (!done.every(Boolean)) return;
  const { same, at, head, rest } = verdict(on, off, { fair: !parallel, guarantee: model.paceline.guarantee });
  turn.replies.append(make("p", same ? "verdict same" : "verdict differs", make("strong", "", head), ` ${rest}`));
  if (!same) for (const reply of [on, off]) reply.mark(at);
  new Announcer().say(`${head} ${rest}`);
  follow();
}

/** Fills a reply from the server; returns false if it failed. */
async function stream(reply, body, turn, announcer = null) {
  reply.element.classList.add("running");
  try {
    for await (const event of chat(body, running.signal)) {
      reply.update(event);
      announcer?.add(event.content ?? "");
      follow();
    }
    if (reply.finish === "length") reply.say("Stopped at the token limit.");
    announcer?.end();
    return true;
  } catch (error) {
    if (error.name === "AbortError") reply.say("Stopped.");
    else fail(reply, turn, error);
    return error.name === "AbortError";
  } finally {
    reply.element.classList.remove("running");
    reply.paint(true);
    follow();
  }
}

function fail(reply, turn, error) {
  if (error.status === 401) askKey(error);
  const line = reply.say(error instanceof ServerError ? error.message : `The page failed: ${error.message}`, "problem");
  line.setAttribute("role", "alert");
  const again = make("button", "", "Try again");
  again.addEventListener("click", () => running || !settings.valid() || answer(turn));
  line.after(again);
}

function busy(controller) {
  running = controller;
  $("#send").hidden = Boolean(controller);
  $("#stop").hidden = !controller;
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
const follow = () => atEnd && scrollTo(0, document.documentElement.scrollHeight);

function stop() {
  running?.abort();
  field.focus();
}

function newChat() {
  running?.abort();
  turns = [];
  $("#turns").replaceChildren();
  $("#intro").hidden = false;
  field.focus();
}

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
keyForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  keepKey($("#key").value);
  $("#key").value = "";
  if (await connect()) field.focus();
});

settings.start();
watch($("#turns"));
connect();
