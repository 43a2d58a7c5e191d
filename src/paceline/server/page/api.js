// Requests to the server. URLs are relative, so that the page also works under a proxy's path.

import { keptInTab } from "./dom.js";

/** A failed request; `message` is the server's own if it sent one. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// The key is kept for this tab only, until the tab is closed.
export const keepKey = (key) => keptInTab.set("api-key", key);
const key = () => keptInTab.get("api-key");

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  let message = body?.error?.message ?? `The server answered ${response.status} ${response.statusText}`;
  const wait = response.headers.get("Retry-After");
  if (wait) message += ` (try again in about ${wait} s)`;
  return new ServerError(message, response.status);
}

/** The models that are served: [{id, paceline: {loaded, drafters, default, guarantee, context_length, sampling}}]. */
export async function models() {
  const { data } = await (await request("v1/models")).json();
  return data;
}

/** Yields {tokens, round, content, reasoning, finish, progress} for each event of the reply. */
export async function* chat(body, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true }, trace: true, return_progress: true };
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(streamed), signal });
  for await (const event of events(response.body)) {
    if (event.error) throw new ServerError(event.error.message);
    const choice = event.choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: reasoning } = choice.delta ?? {};
    const tokens = choice.trace ?? untraced((reasoning ?? "") + (content ?? ""));
    const texts = { content: content ?? "", reasoning: reasoning ?? "" };
    yield { tokens, round: choice.round, ...texts, finish: choice.finish_reason, progress: event.prompt_progress };
  }
}

// A server that sends no trace still sends text.
const untraced = (content) => (content ? [{ text: content, origin: "plain" }] : []);

/** The events of a stream of `data:` lines, parsed, up to `[DONE]`. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    yield* parsed(reader);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function* parsed(reader) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke before the reply was complete.");
    });
    if (done) throw new ServerError("The connection ended before the reply was complete.");
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
