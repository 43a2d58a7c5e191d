// Emphasis, code, formulas and links within a line of Markdown. Text only ever becomes text nodes, no image is fetched, and links
// lead only to http, https and mailto. HTML is shown as text.
import { make } from "./dom.js";
import { formula } from "./formula.js";

/** Maximum levels of nested lists, quotations and emphasis. */
export const DEEPEST = 6;

const SPECIAL = /[\\`*_~[!<$]|https?:\/\//g;
const LINK = /\[((?:[^[\]\\]|\\.|\[[^[\]]*\]){0,500})\]\(\s*<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500}){0,3})>?(?:\s+["'][^"'\n]{0,300}["'])?\s*\)/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>|<br *\/?>/iy;
const ADDRESS = /https?:\/\/[^\s<>"`*]{1,2000}/y;
const DISPLAYED = /\$\$((?:[^$]|\$(?!\$))+)\$\$/y;
// As in pandoc, and not next to a letter or a digit: "$5 and $10" are prices.
const DOLLARS = /(?<![A-Za-z0-9])\$(?!\s)((?:[^$\\`]|\\.)+)(?<!\s)\$(?![A-Za-z0-9])/sy;
const TAGS = ["", "em", "strong"];

/** Returns the nodes of a text with emphasis, code and links. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // Marks that do not occur again. Searching for them more than once would be slow.
  let plain = 0;
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (!special) break;
    at = special.index;
    const found = depth < DEEPEST && READERS[special[0][0]](text, at, depth, missing);
    if (!found) {
      at += run(text, at);
      continue;
    }
    if (plain < at) nodes.push(text.slice(plain, at));
    nodes.push(...found.nodes);
    plain = at = found.end;
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

/** Length of the run of one character. */
function run(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

const READERS = {
  "\\": backslash,
  "$": dollars,
  "`": codeSpan,
  "*": emphasis,
  "_": emphasis,
  "~": strike,
  "[": link,
  "!": (text, at) => (text[at + 1] === "[" ? link(text, at + 1, DEEPEST) : null),
  "<": autolink,
  h: address,
};

/** A formula in \\(...\\) or \\[...\\], or an escaped character. */
function backslash(text, at, depth, missing) {
  const next = text[at + 1] ?? "";
  const close = { "(": "\\)", "[": "\\]" }[next];
  if (!close) return /[`*_{}#+\-.!|~<>$]/.test(next) ? { nodes: [next], end: at + 2 } : null;
  const end = missing.has(close) ? -1 : text.indexOf(close, at + 2);
  if (end < 0) return void missing.add(close);
  return typeset(text, at, text.slice(at + 2, end), end + 2, next === "[");
}

function dollars(text, at) {
  const display = text[at + 1] === "$";
  const pattern = display ? DISPLAYED : DOLLARS;
  pattern.lastIndex = at;
  const [whole, tex] = pattern.exec(text) ?? [];
  return whole ? typeset(text, at, tex, at + whole.length, display) : null;
}

/** A formula, or its source if it is not valid. The line break after a displayed formula is dropped. */
function typeset(text, at, tex, end, display) {
  const element = formula(tex, display);
  if (!element) return { nodes: [text.slice(at, end)], end };
  return { nodes: [element], end: display && text[end] === "\n" ? end + 1 : end };
}

function codeSpan(text, at, depth, missing) {
  const length = run(text, at);
  if (missing.has(`\`${length}`)) return null;
  for (let from = at + length; (from = text.indexOf("`", from)) >= 0; ) {
    const closing = run(text, from);
    if (closing === length) {
      const inside = text.slice(at + length, from).replaceAll("\n", " ");
      const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
      return { nodes: [make("code", "", padded ? inside.slice(1, -1) : inside)], end: from + length };
    }
    from += closing;
  }
  missing.add(`\`${length}`);
  return null;
}

const word = (char) => Boolean(char) && /[\p{L}\p{N}]/u.test(char);
const space = (char) => !char || /\s/.test(char);

function emphasis(text, at, depth, missing) {
  const mark = text[at];
  const length = Math.min(run(text, at), 3);
  const begin = at + length;
  if (run(text, at) > 3 || space(text[begin]) || (mark === "_" && word(text[at - 1])) || missing.has(mark + length)) return null;
  for (let from = begin; (from = text.indexOf(mark, from)) >= 0; ) {
    const closing = run(text, from);
    const end = from + closing;
    const fits = closing >= length && !(length === 1 && closing === 2);
    if (fits && !space(text[from - 1]) && text[from - 1] !== "\\" && !(mark === "_" && word(text[end]))) {
      const inside = inline(text.slice(begin, end - length), depth + 1);
      const nodes = length === 3 ? [make("em", "", make("strong", "", ...inside))] : [make(TAGS[length], "", ...inside)];
      return { nodes, end };
    }
    from = end;
  }
  missing.add(mark + length);
  return null;
}

function strike(text, at, depth, missing) {
  if (run(text, at) !== 2 || space(text[at + 2]) || missing.has("~")) return null;
  const end = text.indexOf("~~", at + 2);
  if (end < 0) return void missing.add("~");
  return { nodes: [make("del", "", ...inline(text.slice(at + 2, end), depth + 1))], end: end + 2 };
}

/** A link, or the address of an image, which is not fetched. */
function link(text, at, depth) {
  LINK.lastIndex = at;
  const [whole, label, url] = LINK.exec(text) ?? [];
  const address = whole && safe(url);
  if (!address) return null;
  return { nodes: [anchor(address, ...(label ? inline(label, depth + 1) : [url]))], end: at + whole.length };
}

function autolink(text, at) {
  AUTOLINK.lastIndex = at;
  const [whole, url] = AUTOLINK.exec(text) ?? [];
  if (whole && !url) return { nodes: [make("br")], end: at + whole.length };
  const address = url && safe(url);
  return address ? { nodes: [anchor(address, url)], end: at + whole.length } : null;
}

function address(text, at) {
  ADDRESS.lastIndex = at;
  let [url] = ADDRESS.exec(text) ?? [];
  if (!url) return null;
  url = url.slice(0, trimmed(url));
  const target = safe(url);
  return target ? { nodes: [anchor(target, url)], end: at + url.length } : null;
}

/** Length of an address without the punctuation of the sentence around it. */
function trimmed(url) {
  let end = url.length;
  while (/[.,;:!?'\])_]/.test(url[end - 1]) && !(url[end - 1] === ")" && url.slice(0, end).includes("("))) end -= 1;
  return end;
}

/** An address that may be opened, normalised; null for any other scheme or a relative one. */
function safe(url) {
  try {
    const { protocol, href } = new URL(url);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

function anchor(href, ...children) {
  const element = make("a", "", ...children);
  element.href = element.title = href;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  return element;
}
