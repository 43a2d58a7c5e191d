// Two views of a reply's text: formatted, and as tokens marked by their origins. Both draw only new text, a bounded part
// in each frame.
import { make } from "./dom.js";
import { CodeBlock, nextBlock, place, render } from "./markdown.js";

const BUDGET = 8; // Milliseconds of a frame for drawing.
const ORIGINS = new Set(["draft", "correction", "bonus", "plain"]);

/** The server's trace of each token that is shown: {text, id, origin, p, drafter, number, round, of}. */
export const tokenInfo = new WeakMap();

/** Markdown. Blocks that cannot change any more are drawn once. */
export class FormattedView {
  #done = 0; // Everything before this offset is final.
  #open = []; // Elements that may still change.
  #code = null; // {seen, shown}: the code block after these elements, which grows in place.

  constructor() {
    this.element = make("div", "text markdown");
  }

  /** Draws the reply so far; returns false if a part of it has to wait for the next frame. */
  draw({ content }) {
    const until = performance.now() + BUDGET;
    for (const element of this.#open) drop(element);
    this.#open = [];
    let at = this.#done;
    for (let block; (block = nextBlock(content, at, this.#code?.seen)); at = block.end) {
      if (block.begun && !this.#open.length) {
        if (!this.#grow(block, content)) return false;
      } else {
        const element = render(block);
        place(this.element, block, element);
        this.element.lastElementChild.dir = "auto";
        if (block.final && !this.#open.length) this.#done = block.end;
        else this.#open.push(element);
      }
      if (performance.now() > until && this.#done === block.end) return false;
    }
    return true;
  }

  /** Draws a code block in place; returns false if a part of it has to wait for the next frame. */
  #grow(block, content) {
    if (!this.#code) {
      this.#code = { seen: 0, shown: new CodeBlock({ ...block, text: "" }) };
      this.element.append(this.#code.shown.element);
    }
    if (!this.#code.shown.show(block.text)) return false;
    if (block.final) {
      this.#done = block.end;
      this.#code = null;
    } else this.#code.seen = Math.max(block.start, content.lastIndexOf("\n") + 1);
    return true;
  }
}

/** Removes an element, and the list that it leaves empty. */
function drop(element) {
  const list = element.parentElement;
  element.remove();
  if (element.tagName === "LI" && !list.childElementCount) list.remove();
}

/** Tokens in their order, with the reply's exact characters. Arrow keys step through them (inspect.js). */
export class TokenView {
  #rounds = 0;
  #count = 0;

  constructor(title) {
    this.element = make("div", "text tokens");
    this.element.dir = "auto";
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
