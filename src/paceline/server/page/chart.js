// The effect of speculation on a reply: numbers, and an image of the drafted and accepted tokens of each round.
import { make, svg } from "./dom.js";

const COLUMNS = { line: 40, chart: 80 }; // More rounds share a column.
const NUMBERS = ["tok/s", "tokens per round", "accepted", "tokens", "rounds"];

/** Numbers in one line, which opens to show the image. */
export class Statistics {
  constructor() {
    this.values = Object.fromEntries(NUMBERS.map((name) => [name, make("b")]));
    this.line = svg("svg", { class: "line", viewBox: "0 0 80 20", preserveAspectRatio: "none", "aria-hidden": "true" });
    const numbers = NUMBERS.map((name) => make("span", "", this.values[name], ` ${name}`));
    this.chart = svg("svg", { class: "chart", viewBox: "0 0 640 150", role: "img" });
    this.caption = make("p", "small muted");
    this.about = make("p", "small muted");
    const summary = make("summary", "numbers", this.line, ...numbers);
    this.element = make("details", "statistics", summary, make("div", "acceptance", this.chart, this.caption, this.about));
    this.element.hidden = true;
  }

  /** Shows {rounds, tokens, rate, perRound, drafted, accepted, about}. */
  show(reply) {
    this.element.hidden = !reply.rounds.length;
    if (this.element.hidden) return;
    this.#set("tokens per round", reply.perRound.toFixed(2));
    this.#set("tok/s", reply.rate === null ? "–" : reply.rate.toFixed(1));
    this.#set("tokens", reply.tokens);
    this.#set("rounds", reply.rounds.length);
    this.#set("accepted", `${Math.round((100 * reply.accepted) / (reply.drafted || 1))} %`);
    for (const name of ["tokens per round", "accepted", "rounds"]) this.values[name].parentElement.hidden = !reply.drafted;
    this.line.toggleAttribute("hidden", !reply.drafted);
    this.about.textContent = reply.about;
    this.#draw(reply);
  }

  #set(name, value) {
    this.values[name].textContent = value;
  }

  #draw({ rounds, drafted, accepted }) {
    const columns = shared(rounds, COLUMNS.chart);
    const most = highest(columns);
    const few = shared(rounds, COLUMNS.line);
    this.line.replaceChildren(...bars(few, highest(few), { x: 0, y: 0, width: 80, height: 20, slots: COLUMNS.line }));
    this.chart.replaceChildren(...axes(most, rounds.length, columns.length), ...bars(columns, most, PLOT));
    const counts = `${accepted} of ${drafted} drafted tokens accepted in ${rounds.length} rounds`;
    this.chart.setAttribute("aria-label", `Acceptance over time: ${counts}`);
    const key = [make("i", "key drafted"), "drafted ", make("i", "key accepted"), "accepted, tokens per round. "];
    this.caption.replaceChildren(...key, drafted ? `${counts}.` : "Nothing was drafted.");
    this.chart.toggleAttribute("hidden", !drafted);
  }
}

const PLOT = { x: 30, y: 10, width: 604, height: 116, slots: 24 };

const highest = (columns) => Math.max(4, ...columns.map((column) => column.drafted));

/** The mean drafted and accepted tokens of each column's rounds. */
function shared(rounds, most) {
  const size = Math.ceil(rounds.length / most);
  const columns = [];
  for (let i = 0; i < rounds.length; i += size) {
    const some = rounds.slice(i, i + size);
    const mean = (name) => some.reduce((sum, round) => sum + (round[name] ?? 0), 0) / some.length;
    columns.push({ drafted: mean("drafted"), accepted: mean("accepted") });
  }
  return columns;
}

function bars(columns, most, { x, y, width, height, slots }) {
  const step = width / Math.max(slots, columns.length);
  return columns.flatMap((column, i) =>
    ["drafted", "accepted"].map((name) => {
      const high = (height * column[name]) / most;
      const place = { x: x + (i + 0.1) * step, y: y + height - high, width: 0.8 * step, height: high };
      return svg("rect", { class: name, ...round(place) });
    }),
  );
}

const round = (place) => Object.fromEntries(Object.entries(place).map(([name, value]) => [name, value.toFixed(2)]));

function axes(most, rounds, columns) {
  const { x, y, width, height, slots } = PLOT;
  const marks = [0, Math.round(most / 2), Math.floor(most)].flatMap((value) => {
    const at = y + height * (1 - value / most);
    return [svg("line", { class: "grid", x1: x, x2: x + width, y1: at, y2: at }), label(x - 8, at + 4, "end", value)];
  });
  const last = x + (width * columns) / Math.max(slots, columns);
  return [...marks, label(last, y + height + 20, columns > 3 ? "end" : "start", `round ${rounds}`)];
}

function label(x, y, anchor, text) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}
