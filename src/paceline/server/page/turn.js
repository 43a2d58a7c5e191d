// One turn of a conversation: a message, which can be edited, and its replies.
import { button, copyButton, make, textButton } from "./dom.js";
import { shown } from "./files.js";
import { Reply } from "./reply.js";

export class Turn {
  replies = [];

  /**
   * `acts`: {idle(), again(turn), edited(turn, prompt), continued(turn), raise(), switched(turn, version)}.
   * `attempt`: how often the reply was generated again; it is added to the seed. `versions`: the turns that were here before
   * an edit or a new reply, each with the turns after it; null at `version`, the version that is shown.
   */
  constructor(prompt, files, acts, { attempt = 0, versions = [null], version = 0 } = {}) {
    Object.assign(this, { files, acts, attempt, versions, version });
    this.message = make("div", "message");
    this.columns = make("div", "replies");
    this.element = make("section", "turn", this.message, this.columns);
    this.#show(prompt);
  }

  /** A turn that `saved` has returned. */
  static restored({ prompt, files = [], replies, verdict, ...rest }, acts, marked) {
    const turn = new Turn(prompt, files, acts, rest);
    turn.columns.classList.toggle("pair", replies.length > 1);
    for (const reply of replies) turn.#add(Reply.restored(reply, marked || replies.length > 1));
    if (verdict) turn.judge(verdict);
    turn.showCuts();
    return turn;
  }

  saved() {
    const { prompt, files, attempt, verdict, versions, version } = this;
    return { prompt, files, attempt, verdict, versions, version, replies: this.replies.map((reply) => reply.saved()) };
  }

  /** The text that later turns continue: the text of the first reply. */
  get text() {
    return this.replies[0]?.content ?? "";
  }

  /** Removes the replies; `pair`: there will be two, side by side. */
  clear(pair) {
    this.replies = [];
    this.verdict = null;
    this.columns.replaceChildren();
    this.columns.classList.toggle("pair", pair);
  }

  begin(title, about, marked) {
    return this.#add(new Reply(title, about, marked));
  }

  #add(reply) {
    if (!this.replies.length) {
      const again = button("Regenerate with the next seed", "retry", () => this.acts.again(this));
      again.classList.add("again");
      reply.tools.append(again);
    }
    reply.tools.prepend(copyButton(() => reply.content, "Copy reply"));
    this.replies.push(reply);
    this.columns.append(reply.element);
    return reply;
  }

  /** Shows where the limit cut off a reply. The reply can go on, unless it is compared with another one. */
  showCuts() {
    for (const reply of this.replies.filter(({ limit }) => limit)) {
      const line = reply.say(`Cut off at the limit of ${reply.limit} tokens. `, "cut small");
      const go = textButton("Continue", () => this.acts.continued(this));
      if (reply.content && this.replies.length === 1) line.append(go);
      line.append(textButton("Raise the limit", this.acts.raise));
    }
  }

  /** Shows how two replies compare: the result of `verdict` in compare.js. */
  judge(verdict) {
    const { same, head, rest } = (this.verdict = verdict);
    this.columns.append(make("p", same ? "verdict same" : "verdict differs", make("strong", "", head), ` ${rest}`));
  }

  /** Shows tokens marked by their origins, as replies side by side always do. */
  mark(marked) {
    for (const reply of this.replies) reply.mark(marked || this.replies.length > 1);
  }

  #show(prompt) {
    this.prompt = prompt;
    const { version, versions, acts } = this;
    const step = (label, name, by) => {
      const element = button(label, name, () => acts.idle() && acts.switched(this, version + by));
      element.disabled = !(version + by in versions);
      return element;
    };
    const count = make("span", "small muted", `${version + 1} / ${versions.length}`);
    const choice = make("div", "versions", step("Previous version", "previous", -1), count, step("Next version", "next", 1));
    choice.hidden = versions.length < 2;
    const edit = button("Edit message", "edit", () => this.acts.idle() && this.#edit());
    const tools = make("div", "tools", copyButton(() => this.prompt, "Copy message"), edit, choice);
    const bubble = make("p", "bubble", prompt);
    bubble.dir = "auto";
    bubble.hidden = !prompt;
    this.message.replaceChildren(make("h3", "hidden", "You"), ...shown(this.files), bubble, tools);
    return edit;
  }

  /** Changes the question. `tail`: this turn and the turns after it, as returned by `saved`, if they stay as a version. */
  renew(prompt, attempt, tail) {
    if (tail) {
      this.versions[this.version] = tail;
      this.version = this.versions.push(null) - 1;
    }
    this.attempt = attempt;
    this.#show(prompt);
  }

  #edit() {
    const field = make("textarea");
    field.dir = "auto";
    field.value = this.prompt;
    field.rows = Math.min(12, this.prompt.split("\n").length + 1);
    field.setAttribute("aria-label", "Edit message");
    const end = () => this.#show(this.prompt).focus();
    const row = make("div", "row", make("button", "primary", "Send again"), textButton("Cancel", end));
    const form = make("form", "edit", field, row);
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") end();
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const prompt = field.value.trim();
      if ((prompt || this.files.length) && this.acts.idle()) this.acts.edited(this, prompt);
    });
    this.message.replaceChildren(make("h3", "hidden", "You"), ...shown(this.files), form);
    field.focus();
  }
}
