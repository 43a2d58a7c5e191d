// The settings: their values for a request, and the panel.
import { $, make } from "./dom.js";

const form = $("#settings-form");
const panel = $("#settings");
const button = $("#settings-button");
const wide = matchMedia("(min-width: 60rem)");

/** Reads the form: {sampling, speculation, compare, parallel}. */
export function read() {
  const fields = form.elements;
  const sampling = {};
  for (const name of ["temperature", "top_p", "seed", "max_tokens"]) sampling[name] = fields[name].valueAsNumber;
  return {
    sampling,
    speculation: speculation(fields.drafter.value, fields.max_draft.valueAsNumber),
    compare: fields.compare.checked,
    parallel: fields.order.value === "parallel",
  };
}

/** A draft length without a drafter is sent for the server's default drafter. */
function speculation(drafter, length) {
  if (drafter === "off" || (drafter === "auto" && !length)) return drafter;
  return { ...(drafter !== "auto" && { drafter }), ...(length && { max_draft: length }) };
}

/** Returns whether all fields are valid, and shows the first that is not. */
export function valid() {
  if (form.checkValidity()) return true;
  toggle(true);
  return form.reportValidity();
}

/** Offers the server's drafters, and sets the model's recommended sampling. */
export function offer({ id, paceline: { drafters = [], guarantee, context_length: room, sampling = {} } = {} }) {
  for (const name of ["temperature", "top_p"]) {
    const input = form.elements[name];
    // Only if the user has not changed it.
    if (name in sampling && input.value === input.defaultValue) input.value = sampling[name];
  }
  const off = form.elements.drafter.querySelector("[value=off]");
  for (const option of [...form.elements.drafter.options]) if (!["auto", "off"].includes(option.value)) option.remove();
  // "auto" is in the list already.
  off.before(...drafters.filter((name) => name !== "auto").map((name) => make("option", "", name)));
  const kept = guarantee === "bits" ? "bit for bit" : "up to rounding";
  $("#promise").textContent =
    `${id}. Same prompt, seed and settings: the same text, with or without speculation (exact ${kept}).` +
    (room ? ` Context: ${room.toLocaleString("en")} tokens.` : "");
}

function toggle(open) {
  panel.hidden = !open;
  button.setAttribute("aria-expanded", open);
}

function sync() {
  const { drafter, max_draft, compare } = form.elements;
  const off = drafter.querySelector("[value=off]");
  // Comparing off with off would show nothing.
  off.disabled = compare.checked;
  if (compare.checked && drafter.value === "off") drafter.value = "auto";
  max_draft.disabled = drafter.value === "off";
  $("#order").hidden = !compare.checked;
}

export function start() {
  toggle(wide.matches);
  wide.addEventListener("change", () => toggle(wide.matches));
  button.addEventListener("click", () => {
    toggle(panel.hidden);
    if (!panel.hidden) form.elements.drafter.focus();
  });
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    toggle(false);
    button.focus();
  });
  panel.addEventListener("focusout", ({ relatedTarget: next }) => {
    // If the panel covers the page, it must not cover the element with the focus.
    if (next && next !== button && !panel.contains(next) && !wide.matches) toggle(false);
  });
  form.addEventListener("change", sync);
  form.addEventListener("submit", (event) => event.preventDefault());
  sync();
  startTheme();
}

function startTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    $("#theme").textContent = dark() ? "Light" : "Dark";
    $("#theme").setAttribute("aria-label", dark() ? "Light theme" : "Dark theme");
  };
  $("#theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch {
      // Storage is not allowed: the choice lasts as long as the page.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}
