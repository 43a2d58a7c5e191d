// Markdown as models write it, converted to elements block by block. Every search is bounded, so that no text is slow.
import { copyButton, make } from "./dom.js";
import { DEEPEST, inline } from "./inline.js";

const LONGEST = 8000; // Characters after which a block ends, so that drawing a growing block again stays cheap.

const FENCE = /^ {0,9}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}(?=\S)| *$)/;
const DISPLAYED = /^ *(\$\$|\\\[)/;
const DELIMITERS = /^\|?(?:[ \t]*:?-+:?[ \t]*\|)*(?:[ \t]*:?-+:?)?$/;

/** The line at an offset: {text, end, next}. The following line begins at `next`. A long line counts as several. */
function lineAt(source, at) {
  const part = source.slice(at, at + LONGEST);
  const length = part.indexOf("\n");
  if (length < 0) return { text: part, end: at + part.length, next: at + part.length };
  return { text: part.slice(0, length), end: at + length, next: at + length + 1 };
}

const BLANK = /\s*/y;
const blank = (text) => !text.trim();
const isTable = (source, line) => line.text.includes("|") && line.next < source.length && isDelimiters(lineAt(source, line.next).text);
const isDelimiters = (text) => text.includes("-") && text.includes("|") && DELIMITERS.test(text.trim());
/** Returns true if a line ends a paragraph. As in CommonMark, a numbered item does so only if it has the number 1. */
const begins = (source, line) =>
  FENCE.test(line.text) || HEADING.test(line.text) || RULE.test(line.text) || QUOTE.test(line.text) || DISPLAYED.test(line.text) ||
  /^ *[-*+] +\S|^ *1[.)] +\S/.test(line.text) || isTable(source, line);

/**
 * Returns the first block at or after an offset: {kind, start, end, text, ...}, or null. `final`: true if the block cannot
 * change when the source grows. `seen`: an offset up to which a code block that begins here is known to be open.
 */
export function nextBlock(source, from, seen = 0) {
  BLANK.lastIndex = from;
  BLANK.test(source);
  const word = BLANK.lastIndex;
  if (word === source.length) return null;
  from = Math.max(from, source.lastIndexOf("\n", word) + 1);
  const block = { start: from, ...classify(source, lineAt(source, from), from, seen) };
  block.final ??= block.end - from >= LONGEST || goesOnBehind(source, block.end);
  return block;
}

/** Returns true if a complete line follows that is not blank. Until then, the block may still grow. */
function goesOnBehind(source, end) {
  const rest = source.slice(end, end + LONGEST);
  const word = rest.search(/\S/);
  return word >= 0 && (rest.indexOf("\n", word) >= 0 || rest.length === LONGEST);
}

function classify(source, line, from, seen) {
  const fence = FENCE.exec(line.text);
  if (fence) return code(source, line, fence, seen);
  const heading = HEADING.exec(line.text);
  if (heading) {
    const text = line.text.slice(heading[0].length).trim().replace(/[ \t]#+$/, "");
    return { kind: "heading", level: heading[1].length, text, end: line.next, final: line.end < line.next };
  }
  if (RULE.test(line.text)) return { kind: "rule", end: line.next };
  if (QUOTE.test(line.text)) return quote(source, from);
  const item = ITEM.exec(line.text);
  if (item) return listItem(source, line, item);
  const displayed = DISPLAYED.exec(line.text);
  if (displayed) return formula(source, line, from, displayed);
  if (isTable(source, line)) return lines(source, from, "table", (next) => next.text.includes("|"));
  return lines(source, from, "paragraph", (next) => !begins(source, next));
}

/** A block of this line and the lines after it that are not blank and belong to it. */
function lines(source, from, kind, belongs) {
  let { next: end } = lineAt(source, from);
  while (end < source.length && end - from < LONGEST) {
    const line = lineAt(source, end);
    if (blank(line.text) || !belongs(line)) break;
    end = line.next;
  }
  return { kind, text: source.slice(from, end).trimEnd(), end };
}

/** A paragraph that begins with a formula. The lines of the formula are not items or quotations. */
function formula(source, line, from, [start, sign]) {
  const close = sign === "$$" ? "$$" : "\\]";
  let open = !line.text.slice(start.length).includes(close);
  return lines(source, from, "paragraph", (next) => {
    if (!open) return !begins(source, next);
    open = !next.text.includes(close);
    return true;
  });
}

function code(source, line, [, marker, words], seen) {
  const [language] = words.trim().slice(0, 40).split(/\s/);
  const close = new RegExp(`^ {0,9}${marker[0]}{${marker.length},}[ \\t]*$`, "gm");
  const indent = line.text.search(/\S/);
  close.lastIndex = Math.max(line.next, seen);
  const found = line.end < line.next ? close.exec(source) : null;
  const end = found ? Math.min(close.lastIndex + 1, source.length) : source.length;
  let text = source.slice(line.next, found ? Math.max(line.next, found.index - 1) : end);
  if (!found) text = text.replace(/\n[ `~]*$/, ""); // Hide a line that may become the closing fence.
  if (indent) text = text.replace(new RegExp(`^ {1,${indent}}`, "gm"), "");
  // The closing fence may be the beginning of a longer line.
  const final = Boolean(found) && close.lastIndex < source.length;
  return { kind: "code", language, text, end, begun: line.end < line.next, final };
}

function quote(source, from) {
  const block = lines(source, from, "quote", (line) => QUOTE.test(line.text) || !begins(source, line));
  return { ...block, text: block.text.replace(/^ {0,3}> ?/gm, "") };
}

/** An item with the lines that are indented below it, or that continue its paragraph. */
function listItem(source, line, [marker, spaces, sign]) {
  const start = line.end - line.text.length;
  const texts = [line.text.slice(marker.length)];
  const fences = new Fences(texts[0]);
  let end = line.next;
  let gap = 0;
  for (let at = end; at < source.length && at - start < LONGEST; ) {
    const next = lineAt(source, at);
    at = next.next;
    if (blank(next.text)) {
      gap += 1;
      continue;
    }
    const indent = next.text.search(/\S/);
    const lazy = !gap && !fences.open && !ITEM.test(next.text) && !begins(source, next);
    if (indent < spaces.length + 2 && !lazy) break;
    texts.push(...Array(gap).fill(""), next.text.slice(Math.min(indent, marker.length)));
    fences.read(next.text);
    gap = 0;
    end = at;
  }
  const number = /^\d/.test(sign) ? parseInt(sign, 10) : null;
  return { kind: "item", number, text: texts.join("\n"), end };
}

/** Returns true if a code block is open after the lines that were read. */
class Fences {
  open = null;

  constructor(line) {
    this.read(line);
  }

  read(line) {
    const [, fence] = /^ *(`{3,}|~{3,})/.exec(line) ?? [];
    if (!fence) return;
    if (!this.open) this.open = fence;
    else if (line.trim().startsWith(this.open)) this.open = null;
  }
}

/** Returns the element of a block. */
export function render(block, depth = 0) {
  switch (block.kind) {
    case "heading":
      return make(`h${Math.min(block.level + 3, 6)}`, `level${block.level}`, ...inline(block.text));
    case "rule":
      return make("hr");
    case "code":
      return new CodeBlock(block).element;
    case "quote":
      return make("blockquote", "", ...nested(block.text, depth));
    case "item":
      return make("li", "", ...task(block, depth));
    case "table":
      return table(block.text);
    default:
      return make("p", "", ...inline(block.text));
  }
}

/** Adds an element to others; list items go into the list that ends them. */
export function place(parent, block, element) {
  if (block.kind !== "item") return void parent.append(element);
  const tag = block.number === null ? "UL" : "OL";
  let list = parent.lastElementChild;
  if (list?.tagName !== tag) {
    list = make(tag);
    if (block.number !== null) list.start = block.number;
    parent.append(list);
  }
  list.append(element);
}

function nested(text, depth) {
  if (depth >= DEEPEST) return [make("p", "", text)];
  const inside = make("div");
  for (let block = nextBlock(text, 0); block; block = nextBlock(text, block.end)) {
    place(inside, block, render(block, depth + 1));
  }
  return [...inside.childNodes];
}

function task({ text }, depth) {
  const box = /^\[([ xX])\] /.exec(text);
  if (!box) return nested(text, depth);
  const done = box[1] !== " ";
  const mark = make("span", "task", done ? "☑" : "☐");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", done ? "Done" : "To do");
  return [mark, ...nested(text.slice(box[0].length), depth)];
}

function cells(row) {
  const inner = row.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(text) {
  const [head, delimiters, ...rows] = text.split("\n");
  const align = cells(delimiters).map((cell) => (/^:.*:$/.test(cell) ? "center" : cell.endsWith(":") ? "end" : ""));
  const row = (line, tag) => {
    const found = cells(line).slice(0, align.length); // Short rows are not filled, because that could take quadratic time.
    return make("tr", "", ...found.map((cell, i) => make(tag, align[i], ...inline(cell))));
  };
  const body = make("tbody", "", ...rows.map((line) => row(line, "td")));
  const scroller = make("div", "table", make("table", "", make("thead", "", row(head, "th")), body));
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "group");
  scroller.setAttribute("aria-label", "Table");
  return scroller;
}

const CHUNK = 4000;
const PER_FRAME = 40_000;

/** A code block, which grows only at its end. Its text is split into pieces, so that the browser need not lay out all of it. */
export class CodeBlock {
  constructor({ language, text }) {
    this.text = "";
    this.shown = 0;
    this.code = make("code");
    const pre = make("pre", "", this.code);
    pre.tabIndex = 0;
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", language ? `Code: ${language}` : "Code");
    const bar = make("div", "bar", make("span", "", language || "code"), copyButton(() => this.text, "Copy code", "Copy"));
    this.element = make("div", "code", bar, pre);
    this.element.dir = "ltr";
    this.show(text);
  }

  /** Shows a longer text. Returns false if a part of it has to wait for the next frame. */
  show(text) {
    this.text = text;
    if (text.length < this.shown) {
      this.code.replaceChildren();
      this.shown = 0;
    }
    const until = Math.min(text.length, this.shown + PER_FRAME);
    while (this.shown < until) {
      let piece = this.code.lastChild;
      if (!piece || piece.dataset.full) this.code.append((piece = make("span", "piece")));
      let end = Math.min(until, this.shown + CHUNK);
      // A piece ends at the end of a line: it is a block of its own.
      const newline = text.lastIndexOf("\n", end - 1) + 1;
      if (newline > this.shown) {
        end = newline;
        if (piece.textContent.length + end - this.shown >= CHUNK) piece.dataset.full = "1";
      }
      piece.append(text.slice(this.shown, end));
      piece.normalize();
      this.shown = end;
    }
    return this.shown === text.length;
  }
}
