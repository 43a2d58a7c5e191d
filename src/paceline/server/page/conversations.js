// The list of conversations: search, open, rename, export, delete.
import { $, button, make, textButton } from "./dom.js";
import { content } from "./files.js";
import * as store from "./store.js";

const list = $("#list");
const notice = $("#chats-notice");
const search = $("#search");
const PAUSE = 150; // Milliseconds without a keystroke until the conversations are searched.
let shows = 0;
const TITLE = 60; // Characters.

export const titleOf = (prompt) => {
  const words = prompt.replace(/\s+/g, " ").trim();
  return words.length > TITLE ? `${words.slice(0, TITLE - 1)}…` : words;
};

/** Shows the list. `acts`: {open(id), current() -> id, renamed(id, title), removed(id), restored(id)}. */
export async function show(acts) {
  const turn = (shows += 1);
  const all = await store.list();
  const words = search.value.trim().toLowerCase();
  const found = words ? new Set(await store.find(words)) : null;
  if (turn !== shows || list.querySelector("input")) return; // There is a newer list, or a title is being edited.
  const entries = found ? all.filter(({ id }) => found.has(id)) : all;
  list.replaceChildren(...entries.map((entry) => item(entry, acts)));
  search.hidden = !all.length;
  const none = $("#chats-none");
  none.hidden = entries.length > 0;
  none.textContent = words ? "No conversation contains these words." : "Conversations are kept only in this browser.";
}

export function startSearch(acts) {
  let timer;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => show(acts), PAUSE);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !search.value) return;
    event.preventDefault(); // Otherwise, Escape closes the panel.
    search.value = "";
    show(acts);
  });
}

function item({ id, title }, acts) {
  const open = make("button", "open", title);
  open.type = "button";
  open.dir = "auto";
  open.title = title;
  open.addEventListener("click", () => acts.open(id));
  const row = make("li", "", open);
  if (id !== acts.current()) return row;
  open.setAttribute("aria-current", "true");
  const tools = make("div", "tools",
    button("Rename conversation", "edit", () => rename(row, id, title, acts)),
    button("Export conversation", "export", () => save(id)),
    button("Delete conversation", "delete", () => remove(id, title, acts)));
  row.append(tools);
  return row;
}

function rename(row, id, title, acts) {
  const field = make("input");
  field.value = title;
  field.dir = "auto";
  field.maxLength = 200;
  field.setAttribute("aria-label", "New name");
  let ended = false;
  const end = async (keep) => {
    if (ended) return;
    ended = true;
    const name = field.value.trim();
    field.remove();
    if (keep && name && name !== title) await acts.renamed(id, name);
    await show(acts);
    list.querySelector("[aria-current]")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  row.replaceChildren(field);
  field.select();
}

/** Downloads a conversation as a file that `/load` of `paceline chat` reads. */
async function save(id) {
  const { title, model, system, turns } = await store.get(id);
  const said = turns.flatMap(({ prompt, files, replies: [first] }) =>
    first?.content ? [["user", content(prompt, files)], ["assistant", first.content]] : [],
  );
  const messages = [...(system ? [["system", system]] : []), ...said].map(([role, words]) => ({ role, content: words }));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([`${JSON.stringify({ title, model, messages }, null, 1)}\n`], { type: "application/json" }));
  link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Deletes a conversation. Until the next deletion, it can be restored. */
async function remove(id, title, acts) {
  await acts.ending();
  const body = await store.get(id);
  await store.remove(id);
  await acts.removed();
  const undo = textButton("Undo", async () => {
    notice.replaceChildren();
    await store.put(body);
    await acts.open(id);
  });
  notice.replaceChildren(make("span", "", `Deleted “${title}”.`), undo);
}
