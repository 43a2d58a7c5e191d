// Conversations, kept by this browser (IndexedDB), or by this page alone where the browser does not allow that.
// Titles and bodies are stored apart, so that the list does not read every reply.

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

export async function put(conversation) {
  const { id, title, updated } = conversation;
  if (await database()) {
    return transact("readwrite", (titles, bodies) => void (titles.put({ id, title, updated }), bodies.put(conversation)));
  }
  memory.titles.set(id, { id, title, updated });
  memory.bodies.set(id, conversation);
}

export async function remove(id) {
  if (await database()) return transact("readwrite", (titles, bodies) => void (titles.delete(id), bodies.delete(id)));
  memory.titles.delete(id);
  memory.bodies.delete(id);
}
