// Conversations, kept by this browser (IndexedDB), or by this page alone where the browser does not allow that.
// Titles and bodies are stored apart, so that the list does not read every reply.

// Tells the other tabs of this browser what changes.
const tabs = new BroadcastChannel("paceline");
const memory = { titles: new Map(), bodies: new Map() };
let opened = null;

function database() {
  opened ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open("paceline", 1);
    } catch {
      return void resolve(null);
    }
    request.onupgradeneeded = () => {
      request.result.createObjectStore("titles", { keyPath: "id" });
      request.result.createObjectStore("bodies", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opened;
}

/** Runs `work` on both stores in one transaction; resolves with the result of the request that it returns. */
async function transact(mode, work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const transaction = base.transaction(["titles", "bodies"], mode);
    const request = work(transaction.objectStore("titles"), transaction.objectStore("bodies"));
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
    await transact("readwrite", (titles, bodies) => void (titles.put({ id, title, updated }), bodies.put(conversation)));
    if (!quietly) tabs.postMessage(id);
    return;
  }
  memory.titles.set(id, { id, title, updated });
  memory.bodies.set(id, conversation);
}

export async function remove(id) {
  if (await database()) {
    await transact("readwrite", (titles, bodies) => void (titles.delete(id), bodies.delete(id)));
    return tabs.postMessage(id);
  }
  memory.titles.delete(id);
  memory.bodies.delete(id);
}

/** Calls `act` with the id of each conversation that another tab stores or deletes. */
export const watch = (act) => tabs.addEventListener("message", ({ data }) => act(data));

/** The ids of the conversations that `fits` accepts. They are read one by one, because all may be too many. */
export async function find(fits) {
  if (!(await database())) return [...memory.bodies.values()].filter(fits).map(({ id }) => id);
  const found = [];
  await transact("readonly", (_, bodies) => {
    const request = bodies.openCursor();
    request.onsuccess = () => {
      if (!request.result) return;
      if (fits(request.result.value)) found.push(request.result.key);
      request.result.continue();
    };
  });
  return found;
}
