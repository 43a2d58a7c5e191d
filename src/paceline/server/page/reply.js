// One reply as it grows: its reasoning, its text in one of two views, statistics.
import { frame, make } from "./dom.js";
import { Statistics } from "./chart.js";
import { FormattedView, TokenView, tokenInfo } from "./views.js";

/** The views by name; `marked` is the one that shows tokens. */
const view = (marked, title) => (marked ? new TokenView(title) : new FormattedView());

export class Reply {
  content = "";
  reasoning = "";
  rounds = []; // {drafted, accepted, ms, tokens}
  tokens = 0;
  drafted = 0;
  accepted = 0;
  finish = null;
  limit = null; // Tokens after which the reply was cut.
  untimed = 0; // Tokens of the rounds that start the timer, which are not timed.
  seconds = 0; // Since the first round, without the prompt, which may come from the prefix cache.
  #drawing = null;
  #parts = { reasoning: 0 };

  /** `about`: the model and the sampling, in words. */
  constructor(title, about, marked) {
    this.title = title;
    this.about = about;
    this.thoughts = make("div", "thoughts");
    this.thoughts.dir = "auto";
    this.thinking = make("details", "reasoning", make("summary", "", "Thinking…"), this.thoughts);
    this.thinking.hidden = true;
    this.statistics = new Statistics();
    this.tools = make("div", "tools");
    const foot = make("div", "foot", this.tools, this.statistics.element);
    this.view = view(marked, title);
    this.element = make("article", "reply", make("h3", "title", title), this.thinking, this.view.element, foot);
  }

  /** A reply that `saved` has returned. */
  static restored({ title, about, content, reasoning, rounds, finish, limit, seconds, untimed, notes = [] }, marked) {
    const reply = new Reply(title, about, marked);
    Object.assign(reply, { content, reasoning, finish, limit, untimed: untimed ?? rounds[0]?.tokens.length ?? 0 });
    for (const { tokens, ...round } of rounds) reply.#add(tokens, round);
    reply.seconds = seconds;
    for (const note of notes) reply.say(note);
    reply.done = true;
    reply.paint();
    return reply;
  }

  /** Everything that can be stored. */
  saved() {
    const { title, about, content, reasoning, rounds, finish, limit, seconds, untimed } = this;
    const notes = [...this.element.querySelectorAll(":scope > .note")].map((line) => line.textContent);
    return { title, about, content, reasoning, rounds, finish, limit, seconds, untimed, notes };
  }

  /** Adds one event of `chat`. */
  update({ tokens = [], round, content = "", reasoning = "", finish }) {
    this.content += content;
    this.reasoning += reasoning;
    this.finish = finish ?? this.finish;
    if (tokens.length) {
      const now = performance.now();
      if (!this.first) this.untimed += tokens.length;
      this.first ??= now - 1000 * this.seconds;
      this.seconds = (now - this.first) / 1000;
      this.#add(tokens, round);
    }
    this.paint();
  }

  /** Shows how much of a long prompt has been read, until the reply goes on. */
  read(progress) {
    if (!progress) {
      this.reading?.remove();
      this.reading = null;
      return;
    }
    if (!this.reading) {
      this.reading = this.say("");
      this.reading.setAttribute("role", "status");
    }
    const [read, total] = [progress.processed, progress.total].map((count) => count.toLocaleString("en"));
    this.reading.textContent = `Reading the prompt: ${read} of ${total} tokens`;
  }

  #add(tokens, round) {
    this.rounds.push({ ...round, tokens });
    this.tokens += tokens.length;
    this.drafted += round?.drafted ?? 0;
    this.accepted += round?.accepted ?? 0;
  }

  get rate() {
    return this.seconds > 0 ? (this.tokens - this.untimed) / this.seconds : null;
  }

  get perRound() {
    return this.tokens / this.rounds.length;
  }

  /** Every token: {text, id, origin, p, drafter}. */
  get trace() {
    return this.rounds.flatMap((round) => round.tokens);
  }

  /** Prepares a reply that was cut off, so that it can continue. */
  resume() {
    this.first = this.limit = this.finish = null;
    this.done = false;
    for (const line of this.element.querySelectorAll(":scope > p, :scope > button")) line.remove();
  }

  /** Draws new text, beginning at the next frame. Returns a promise that resolves once everything is drawn. */
  paint() {
    this.#drawing ??= (async () => {
      do await frame();
      while (!this.#draw());
      this.#drawing = null;
    })();
    return this.#drawing;
  }

  #draw() {
    this.statistics.show(this);
    this.#think();
    return this.view.draw(this);
  }

  #think() {
    this.thinking.hidden = !this.reasoning;
    if (this.#parts.reasoning < this.reasoning.length) {
      this.thoughts.append(this.reasoning.slice(this.#parts.reasoning));
      this.#parts.reasoning = this.reasoning.length;
    }
    this.thinking.firstChild.textContent = this.content || this.done ? "Thoughts" : "Thinking…";
  }

  /** Shows tokens marked by their origins, or formatted text. */
  mark(marked) {
    const next = view(marked, this.title);
    this.view.element.replaceWith(next.element);
    this.view = next;
    return this.paint();
  }

  /** Marks the first token that differs from the other reply. */
  differ(at) {
    const all = [...this.view.element.querySelectorAll(".token")];
    all.find((span) => tokenInfo.get(span).number > at)?.classList.add("differs");
  }

  /** Adds a line under the text: why the reply ended, or what went wrong. */
  say(text, className = "note muted small") {
    const line = make("p", className, text);
    this.view.element.after(line);
    return line;
  }
}
