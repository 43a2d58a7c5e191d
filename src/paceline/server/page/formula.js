// TeX formulas as MathML, by Temml 0.13.5. The folder temml/ contains its files from npm, unchanged, and its licence.
import { make } from "./dom.js";

const LONGEST = 4000; // Characters of a formula.
const DEEPEST = 60; // Levels of nested elements.
const KEPT = 50_000; // Characters of formulas whose elements are kept, because a growing paragraph is drawn again and again.

// A short formula can define macros that expand to millions of tokens.
const DEFINES = /\\(?:[egx]?def|let|futurelet|(?:new|renew|provide)command)(?![a-zA-Z])/;
// Words between two dollar signs, such as in the prices "from $10 to 20$".
const PROSE = /\p{L}{2,}\s+(?:\p{L}\s+)*\p{L}{2,}|^\d[\d.,]*\s+\p{L}{2,}\s/u;

const drawn = new Map();
let kept = 0;

/** Returns a new element for a formula, or null if the text is not a formula. `display`: it has a line of its own. */
export function formula(tex, display) {
  const key = `${display} ${tex}`;
  if (!drawn.has(key)) {
    kept += key.length;
    if (kept > KEPT) {
      drawn.clear();
      kept = key.length;
    }
    drawn.set(key, draw(tex, display));
  }
  return drawn.get(key)?.cloneNode(true) ?? null;
}

function draw(tex, display) {
  if (!tex.trim() || tex.length > LONGEST || DEFINES.test(tex)) return null;
  if (!tex.includes("\\") && PROSE.test(tex)) return null;
  const element = make("span", display ? "formula display" : "formula");
  element.dir = "ltr";
  try {
    window.temml.render(tex, element, { displayMode: display, throwOnError: true, maxSize: [20, 200], wrap: "none" });
  } catch {
    return null;
  }
  // Names and links inside the page, from \label and \ref.
  for (const name of ["id", "href"]) for (const one of element.querySelectorAll(`[${name}]`)) one.removeAttribute(name);
  return depth(element) > DEEPEST ? null : element;
}

function depth(element) {
  let levels = 0;
  for (let level = [element]; level.length; levels += 1) level = level.flatMap(({ children }) => [...children]);
  return levels;
}
