// One reply as it grows: tokens marked by their origins, and statistics.
import { make, svg } from "./dom.js";

const ORIGINS = new Set(["draft", "correction", "bonus", "plain"]);

/** The server's trace of each token that is shown: {text, id, origin, p, drafter, number, round}. */
export const tokenInfo = new WeakMap();

export class Reply {
  /** `scale` {max}: tokens of a full bar, shared by replies side by side. */
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
    this.numbers = new Statistics(scale);
    this.element = make("article", "reply", make("h3", "title", title), this.text, this.numbers.element);
  }

  /** Adds one event of `chat`. */
  update({ tokens = [], round, content = "", finish, usage }) {
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
      // A part of a character, or the possible start of a stop string, has no text to show.
      if (token.text) group.append(show({ ...token, number: this.tokens.length, round, of: this.rounds.length }));
    }
    this.text.append(group);
  }

  /** Tokens per second since the first round, without the prompt, which may come from the prefix cache. */
  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - this.rounds[0]) / seconds : null;
  }

  get perRound() {
    return this.usage?.speculation?.tokens_per_round ?? this.tokens.length / this.rounds.length;
  }

  /** Redraws the statistics, at most once per frame. */
  paint(now = false) {
    if (now) {
      cancelAnimationFrame(this.frame);
      this.frame = null;
      this.numbers.show(this);
    } else {
      this.frame ??= requestAnimationFrame(() => this.paint(true));
    }
  }

  /** Marks the first token that differs from the other reply. */
  mark(at) {
    const all = [...this.text.querySelectorAll(".token")];
    all.find((span) => tokenInfo.get(span).number > at)?.classList.add("differs");
  }

  /** Adds a line under the text: why the reply ended, or what went wrong. */
  say(text, className = "muted small") {
    const line = make("p", className, text);
    this.text.after(line);
    return line;
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

const BARS = 60;
const HEIGHT = 24;

/** Tokens per round, tokens per second, counts, and a bar for each of the last rounds. */
class Statistics {
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
    this.scale.max = Math.max(this.scale.max, ...last);
    this.bars.setAttribute("viewBox", `0 0 ${slots * 2} ${HEIGHT}`);
    this.bars.replaceChildren(...last.map((count, i) => {
      const height = (HEIGHT * count) / this.scale.max;
      return svg("rect", { x: i * 2, y: HEIGHT - height, width: 1.4, height });
    }));
    this.bars.setAttribute("aria-label", `Tokens of the last ${last.length} rounds, ${Math.max(...last)} at most`);
  }
}
