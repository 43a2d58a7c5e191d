// Conversations, kept by this browser (IndexedDB), or only by this page if the browser does not allow that.
// Titles, texts and bodies are stored separately, so that neither the list nor the search reads every token.

// Tells the other tabs of this browser about changes.
const tabs = new BroadcastChannel("paceline");
const STORES = ["titles", "bodies", "texts"];
const memory = { titles: new Map(), bodies: new Map() };
let opened = null;

function database() {
  opened ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open("paceline", 2);
    } catch {
      return void resolve(null);
    }
    request.onupgradeneeded = ({ oldVersion }) => {
      for (const name of oldVersion ? ["texts"] : STORES) request.result.createObjectStore(name, { keyPath: "id" });
      if (oldVersion) addTexts(request.transaction);
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close(); // A newer page is open in another tab.
      resolve(request.result);
    };
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opened;
}

/** Adds the texts of conversations that were stored by an older page, which had no search. */
function addTexts(transaction) {
  const request = transaction.objectStore("bodies").openCursor();
  request.onsuccess = () => {
    if (!request.result) return;
    transaction.objectStore("texts").put({ id: request.result.key, text: textOf(request.result.value) });
    request.result.continue();
  };
}

/** All text of a conversation, in lower case. */
const textOf = ({ title, turns }) => [title, ...written(turns)].join("\n").toLowerCase();

/** Each text of some turns, and of their other versions. */
const written = (turns) =>
  turns.flatMap(({ prompt, files = [], replies, versions = [] }) => [
    ...[prompt, ...files.flatMap(({ name, text }) => [name, text]), ...replies.map(({ content }) => content)],
    ...versions.flatMap((others) => written(others ?? [])),
  ]);

/** Runs `work` on the stores in one transaction; resolves with the result of the request that it returns. */
async function transact(mode, work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const transaction = base.transaction(STORES, mode);
    const request = work(...STORES.map((name) => transaction.objectStore(name)));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("The browser did not store it."));
  });
}

/** Every conversation, the latest first: [{id, title, updated}]. */
export async function list() {
  const all = (await database()) ? await transact("readonly", (titles) => titles.getAll()) : [...memory.titles.values()];
  return all.sort((a, b) => b.updated - a.updated);
}

/** A conversation: {id, title, updated, model, system, turns}; undefined if it was deleted. */
export async function get(id) {
  if (!(await database())) return memory.bodies.get(id);
  return transact("readonly", (_, bodies) => bodies.get(id));
}

/** Stores a conversation. `quietly`: other tabs need not know yet. */
export async function put(conversation, quietly = false) {
  const { id, title, updated } = conversation;
  if (await database()) {
    await transact("readwrite", (titles, bodies, texts) => {
      titles.put({ id, title, updated });
      bodies.put(conversation);
      texts.put({ id, text: textOf(conversation) });
    });
    if (!quietly) tabs.postMessage(id);
    return;
  }
  memory.titles.set(id, { id, title, updated });
  memory.bodies.set(id, conversation);
}

export async function remove(id) {
  if (await database()) {
    await transact("readwrite", (...stores) => stores.forEach((store) => void store.delete(id)));
    return tabs.postMessage(id);
  }
  memory.titles.delete(id);
  memory.bodies.delete(id);
}

/** Calls `act` with the id of each conversation that another tab stores or deletes. */
export const watch = (act) => tabs.addEventListener("message", ({ data }) => act(data));

/** The ids of the conversations that contain some words, in lower case. Texts may be large, so they are read one by one. */
export async function find(words) {
  if (!(await database())) {
    return [...memory.bodies].filter(([, body]) => textOf(body).includes(words)).map(([id]) => id);
  }
  const found = [];
  await transact("readonly", (_, __, texts) => {
    const request = texts.openCursor();
    request.onsuccess = () => {
      if (!request.result) return;
      const { id, text } = request.result.value;
      if (text.includes(words)) found.push(id);
      request.result.continue();
    };
  });
  return found;
}
