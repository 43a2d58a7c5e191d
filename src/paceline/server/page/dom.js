// Elements.
export const $ = (selector) => document.querySelector(selector);

/** A new element. Children are elements or strings; a string only ever becomes text, so no reply can become markup. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** An SVG element with its attributes. */
export function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const ICONS = {
  attach: "M15.5 9.5l-5.6 5.6a3.4 3.4 0 0 1-4.8-4.8l6.2-6.2a2.3 2.3 0 0 1 3.2 3.2l-6 6a1.1 1.1 0 0 1-1.6-1.6l5.2-5.2",
  chats: "M3 5h14M3 10h14M3 15h9",
  check: "M4 10.5l4 4 8-9",
  close: "M5.5 5.5l9 9M14.5 5.5l-9 9",
  copy: "M7.5 7.5h8.5v8.5H7.5zM12.5 7.5V4H4v8.5h3.5",
  dark: "M16.5 12.2A7 7 0 0 1 7.8 3.5a7 7 0 1 0 8.7 8.7z",
  delete: "M4 6h12M8 6V4h4v2M6 6l.7 10.5h6.6L14 6M8.7 9v4.5M11.3 9v4.5",
  edit: "M4 16l.8-3.5L13.5 3.8l2.7 2.7L7.5 15.2zM12 5.3l2.7 2.7",
  export: "M10 3.5v9M6.5 9.2L10 12.7l3.5-3.5M4 16.5h12",
  light: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM10 2v1.8M10 16.2V18M2 10h1.8M16.2 10H18M4.3 4.3l1.3 1.3M14.4 14.4l1.3 1.3M4.3 15.7l1.3-1.3M14.4 5.6l1.3-1.3",
  new: "M10 4v12M4 10h12",
  next: "M7.5 4.5l5.5 5.5-5.5 5.5",
  previous: "M12.5 4.5L7 10l5.5 5.5",
  retry: "M15.8 8.3A6.2 6.2 0 1 0 16 12M16 4.2v4.3h-4.3",
  settings: "M3 6h7M14 6h3M3 14h3M10 14h7M12 4a2 2 0 1 0 0 4 2 2 0 0 0 0-4zM8 12a2 2 0 1 0 0 4 2 2 0 0 0 0-4z",
};

/** One of the page's icons. Screen readers skip it. */
export function icon(name) {
  const image = svg("svg", { viewBox: "0 0 20 20", width: 18, height: 18, "aria-hidden": "true", class: "icon" });
  image.append(svg("path", { d: ICONS[name] }));
  return image;
}

/** A button with a text. */
export function textButton(text, act) {
  const element = make("button", "", text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

/** A button with an icon. Without a text, it shows only its icon; `label` is its accessible name and tooltip. */
export function button(label, name, act, text = "") {
  const element = make("button", text ? "" : "bare", icon(name), ...(text ? [text] : []));
  element.type = "button";
  name_(element, label);
  element.addEventListener("click", act);
  return element;
}

function name_(element, label) {
  element.setAttribute("aria-label", label);
  element.title = label;
}

/** A button that copies the result of `text`, and says so for a moment. */
export function copyButton(text, label, shown = "") {
  const element = button(label, "copy", async () => {
    const done = await copy(text());
    element.firstChild.replaceWith(icon(done ? "check" : "copy"));
    name_(element, done ? "Copied" : "The browser does not allow copying");
    setTimeout(() => {
      element.firstChild.replaceWith(icon("copy"));
      name_(element, label);
    }, 1500);
  }, shown);
  return element;
}

/** Copies a text. Returns true if the browser allows this. Without TLS, only localhost has the modern API. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make("textarea", "hidden");
    field.value = text;
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

/** Resolves at the next frame, or soon if the tab is hidden and has no frames. */
export function frame() {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, 250);
    requestAnimationFrame(() => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Values in one of the browser's stores, if the browser allows this. */
const keeper = (storage) => ({
  get(name) {
    try {
      return storage().getItem(name);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      storage().setItem(name, value);
    } catch {
      // Storage is not allowed: the value lasts as long as the page.
    }
  },
});
export const kept = keeper(() => localStorage);
export const keptInTab = keeper(() => sessionStorage);
