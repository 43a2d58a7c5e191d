// What a screen reader is told of a reply. Token by token would be noise: it is told whole sentences, in its own time.
import { $ } from "./dom.js";

export class Speaker {
  #heard = "";

  hear(text) {
    this.#heard += text;
    const end = this.#heard.search(/[.!?:\n]\s/);
    if (end < 0) return;
    this.say(this.#heard.slice(0, end + 1));
    this.#heard = this.#heard.slice(end + 1);
  }

  end() {
    this.say(this.#heard);
    this.#heard = "";
  }

  say(text) {
    if (text.trim()) $("#live").replaceChildren(text.trim());
  }
}
