// One reply as it grows: its tokens, marked by how they came, and its numbers.
import { make, svg } from "./dom.js";

const ORIGINS = new Set(["draft", "correction", "bonus", "plain"]);

/** What the server told of each token that is shown: {text, id, origin, p, drafter, number, round}. */
export const told = new WeakMap();

export class Reply {
  /** `scale` {most}: tokens that a full bar stands for; replies side by side share it. */
  constructor(title, scale) {
    this.tokens = [];
    this.content = "";
    this.rounds = [];
    this.drafted = this.accepted = 0;
    this.finish = null;
    this.text = make("div", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", title);
    this.text.setAttribute("aria-describedby", "token-note");
    this.numbers = new Numbers(scale);
    this.element = make("article", "reply", make("h3", "title", title), this.text, this.numbers.element);
  }

  /** Takes one event of `chat`. */
  take({ tokens = [], round, content = "", finish, usage }) {
    this.content += content;
    this.finish = finish ?? this.finish;
    this.usage = usage ?? this.usage;
    if (tokens.length) this.add(tokens, round);
    this.paint();
  }

  add(tokens, round) {
    this.last = performance.now();
    this.first ??= this.last;
    this.rounds.push(tokens.length);
    this.drafted += round?.drafted ?? 0;
    this.accepted += round?.accepted ?? 0;
    const group = make("span", "round");
    for (const token of tokens) {
      this.tokens.push(token);
      // A part of a character, or what a stop string may begin with, has no text of its own to show.
      if (token.text) group.append(show({ ...token, number: this.tokens.length, round, of: this.rounds.length }));
    }
    this.text.append(group);
  }

  /** Tokens a second since the first round; the prompt's share is left out, which the prefix cache may have saved. */
  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - this.rounds[0]) / seconds : null;
  }

  get perRound() {
    return this.usage?.speculation?.tokens_per_round ?? this.tokens.length / this.rounds.length;
  }

  /** Redraws the numbers, at most once a frame: rounds may come faster than anyone can see. */
  paint(now = false) {
    if (now) {
      cancelAnimationFrame(this.frame);
      this.frame = null;
      this.numbers.show(this);
    } else {
      this.frame ??= requestAnimationFrame(() => this.paint(true));
    }
  }

  /** Marks the token at which this reply leaves the other one. */
  mark(at) {
    const all = [...this.text.querySelectorAll(".token")];
    all.find((span) => told.get(span).number > at)?.classList.add("differs");
  }

  /** A line under the text: why the reply ended, or what went wrong. */
  say(text, className = "muted small") {
    const line = make("p", className, text);
    this.text.after(line);
    return line;
  }
}

function show(token) {
  const origin = ORIGINS.has(token.origin) ? token.origin : "plain";
  const span = make("span", `token ${origin}`, token.text);
  // Reached by the arrow keys, by a click or a tap; the Tab key stops at the reply only.
  span.tabIndex = -1;
  told.set(span, { ...token, origin });
  return span;
}

const BARS = 60;
const HEIGHT = 24;

/** Tokens per round, tokens a second, counts, and a bar for each of the last rounds. */
class Numbers {
  constructor(scale) {
    this.scale = scale;
    this.bars = svg("svg", { class: "bars", role: "img", preserveAspectRatio: "none" });
    this.values = {};
    this.element = make("div", "numbers", this.bars);
    this.element.hidden = true;
    for (const label of ["tokens per round", "tok/s", "tokens", "rounds", "drafted accepted"]) {
      this.values[label] = make("b");
      this.element.append(make("span", "", this.values[label], ` ${label}`));
    }
  }

  show(reply) {
    if (!reply.rounds.length) return;
    this.element.hidden = false;
    this.set("tokens per round", reply.perRound.toFixed(2));
    this.set("tok/s", reply.rate === null ? "–" : reply.rate.toFixed(1));
    this.set("tokens", reply.tokens.length);
    this.set("rounds", reply.rounds.length);
    this.set("drafted accepted", `${reply.accepted} of ${reply.drafted}`);
    this.values["drafted accepted"].parentElement.hidden = !reply.drafted;
    this.draw(reply.rounds);
  }

  set(label, value) {
    this.values[label].textContent = value;
  }

  draw(rounds) {
    const last = rounds.slice(-BARS);
    const slots = Math.max(BARS / 2, last.length);
    this.scale.most = Math.max(this.scale.most, ...last);
    this.bars.setAttribute("viewBox", `0 0 ${slots * 2} ${HEIGHT}`);
    this.bars.replaceChildren(...last.map((count, i) => {
      const height = (HEIGHT * count) / this.scale.most;
      return svg("rect", { x: i * 2, y: HEIGHT - height, width: 1.4, height });
    }));
    this.bars.setAttribute("aria-label", `Tokens of the last ${last.length} rounds, ${Math.max(...last)} at most`);
  }
}
