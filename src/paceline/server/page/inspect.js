// Details of a token, shown next to it on hover, keyboard focus or tap.
import { $, make } from "./dom.js";
import { tokenInfo } from "./views.js";

const NAMES = {
  draft: "Drafted and accepted",
  correction: "Corrected: the guess was wrong",
  bonus: "Bonus: all guesses were right, and the model added one more",
  plain: "Plain: nothing was drafted",
};

const tip = $("#tip");
let shown = null;

const tokenAt = (node) => (tokenInfo.has(node) ? node : null);

export function watch(root) {
  root.addEventListener("pointerover", (event) => open(tokenAt(event.target) ?? focused()));
  root.addEventListener("pointerleave", () => open(focused()));
  root.addEventListener("focusin", () => open(focused()));
  root.addEventListener("focusout", () => open(null));
  root.addEventListener("keydown", step);
  // Keep the tip at its token while the page scrolls.
  addEventListener("scroll", () => shown && place(shown), { passive: true });
}

const focused = () => tokenAt(document.activeElement);

function open(token) {
  if (token === shown) return;
  shown?.removeAttribute("aria-describedby");
  shown = token;
  tip.hidden = !token;
  if (!token) return;
  tip.replaceChildren(...facts(tokenInfo.get(token)));
  token.setAttribute("aria-describedby", "tip");
  place(token);
}

function facts({ text, origin, p, drafter, number, round, of }) {
  const lines = [make("code", "", visible(text)), make("span", `kind ${origin}`, NAMES[origin])];
  if (p !== undefined && p !== null) lines.push(make("span", "", `Probability ${percent(p)}`), bar(p));
  if (drafter) lines.push(make("span", "", `Drafter ${drafter}`));
  let place = `Round ${of}`;
  if (round?.drafted) place += `: ${round.accepted} of ${round.drafted} drafted accepted`;
  if (round?.ms) place += `, ${round.ms.toFixed(0)} ms`;
  return [...lines, make("span", "muted", `Token ${number}`), make("span", "muted", place)];
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
const percent = (p) => (p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "under 0.1 %");

function bar(p) {
  const full = make("span", "full");
  full.style.width = `${100 * p}%`;
  return make("span", "probability", full);
}

/** Places the tip above the token, or below it if there is no room, and within the window. */
function place(token) {
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const above = at.top - height - 8;
  tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${above > 60 ? above : at.bottom + 8}px`;
}

/** Arrow keys: left and right by tokens, up and down by rounds; Home, End; Escape to the whole reply. */
function step(event) {
  const text = event.target.closest(".tokens");
  if (!text || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = [...text.querySelectorAll(".token")];
  const now = all.indexOf(event.target);
  const last = all.length - 1;
  const moves = {
    ArrowRight: () => Math.min(now + 1, last),
    ArrowLeft: () => Math.max(now - 1, 0),
    ArrowDown: () => nearest(all, now, 1),
    ArrowUp: () => nearest(all, now, -1),
    Home: () => 0,
    End: () => last,
  };
  if (event.key === "Escape" && now >= 0) text.focus();
  else if (moves[event.key] && all.length) all[moves[event.key]()].focus();
  else return;
  event.preventDefault();
}

/** Index of the first token of the next or the previous round. */
function nearest(all, now, way) {
  if (now < 0) return 0;
  const round = tokenInfo.get(all[now]).of;
  const rounds = all.map((token) => tokenInfo.get(token).of);
  const other = way > 0 ? rounds.find((of) => of > round) : rounds.findLast((of) => of < round);
  return other === undefined ? now : rounds.indexOf(other);
}
