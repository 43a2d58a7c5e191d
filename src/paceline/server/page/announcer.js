// Announces a reply to screen readers in whole sentences, because single tokens would be noise.
import { $ } from "./dom.js";

export class Announcer {
  #pending = "";

  add(text) {
    this.#pending += text;
    const end = this.#pending.search(/[.!?:\n]\s/);
    if (end < 0) return;
    this.say(this.#pending.slice(0, end + 1));
    this.#pending = this.#pending.slice(end + 1);
  }

  end() {
    this.say(this.#pending);
    this.#pending = "";
  }

  say(text) {
    if (text.trim()) $("#live").replaceChildren(text.trim());
  }
}
