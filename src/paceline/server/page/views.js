// Two views of a reply's text: formatted, and as tokens marked by their origins. Both draw what is new, a bounded part of it
// in each frame.
import { make } from "./dom.js";
import { CodeBlock, nextBlock, place, render } from "./markdown.js";

const BUDGET = 8; // Milliseconds of a frame for drawing.
const ORIGINS = new Set(["draft", "correction", "bonus", "plain"]);

/** The server's trace of each token that is shown: {text, id, origin, p, drafter, number, round, of}. */
export const tokenInfo = new WeakMap();

/** Markdown. Blocks that cannot change any more are drawn once. */
export class FormattedView {
  #done = 0; // Everything before it is drawn for good.
  #open = []; // Elements of what may still change.
  #code = null; // {start, seen, block}: the open code block, which grows in place.

  constructor() {
    this.element = make("div", "text markdown");
  }

  /** Draws the reply so far; returns false if a part of it has to wait for the next frame. */
  draw({ content }) {
    const until = performance.now() + BUDGET;
    if (this.#code) return this.#grow(content);
    for (const element of this.#open) drop(element);
    this.#open = [];
    let at = this.#done;
    for (let block = nextBlock(content, at); block; block = nextBlock(content, at)) {
      at = block.end;
      if (block.kind === "code" && !this.#open.length) return this.#begin(block, content);
      const element = render(block);
      place(this.element, block, element);
      if (block.final && !this.#open.length) this.#done = at;
      else this.#open.push(element);
      if (performance.now() > until && this.#done === at) return false;
    }
    return true;
  }

  #begin(block, content) {
    const shown = new CodeBlock({ ...block, text: "" });
    this.element.append(shown.element);
    this.#code = { start: block.start, seen: 0, shown };
    return this.#grow(content);
  }

  #grow(content) {
    const { start, seen, shown } = this.#code;
    const block = nextBlock(content, start, seen);
    const all = shown.show(block.text);
    if (!block.final) this.#code.seen = Math.max(start, content.lastIndexOf("\n") + 1);
    else if (all) {
      this.#done = block.end;
      this.#code = null;
      return nextBlock(content, this.#done) === null;
    }
    return all;
  }
}

/** Removes an element, and the list that it leaves empty. */
function drop(element) {
  const list = element.parentElement;
  element.remove();
  if (element.tagName === "LI" && !list.childElementCount) list.remove();
}

/** Tokens as they came, in the reply's own characters. Arrow keys step through them (inspect.js). */
export class TokenView {
  #rounds = 0;
  #count = 0;

  constructor(title) {
    this.element = make("div", "text tokens");
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", title);
    this.element.setAttribute("aria-describedby", "token-note");
  }

  /** Draws the rounds so far; returns false if some of them have to wait for the next frame. */
  draw({ rounds }) {
    const until = performance.now() + BUDGET;
    while (this.#rounds < rounds.length) {
      this.element.append(this.#round(rounds[this.#rounds], (this.#rounds += 1)));
      if (performance.now() > until) break;
    }
    return this.#rounds === rounds.length;
  }

  #round({ tokens, ...round }, of) {
    const group = make("span", "round");
    for (const token of tokens) {
      this.#count += 1;
      // A part of a character, or the possible start of a stop string, has no text to show.
      if (token.text) group.append(show({ ...token, number: this.#count, round, of }));
    }
    return group;
  }
}

function show(token) {
  const origin = ORIGINS.has(token.origin) ? token.origin : "plain";
  const span = make("span", `token ${origin}`, token.text);
  // Reached by arrow keys, click or tap; the Tab key stops at the whole reply only.
  span.tabIndex = -1;
  tokenInfo.set(span, { ...token, origin });
  return span;
}
