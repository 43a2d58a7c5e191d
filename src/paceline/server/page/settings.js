// The settings: their values for a request, and the theme.
import { $, icon, kept, make } from "./dom.js";
import { Panel } from "./panels.js";

const form = $("#settings-form");
let panel;

/** Reads the form: {sampling, speculation, reasoning, system, compare, parallel}. */
export function read() {
  const fields = form.elements;
  const sampling = {};
  // An empty field leaves the choice to the model.
  for (const name of ["temperature", "top_p", "seed", "max_tokens"]) if (fields[name].value) sampling[name] = fields[name].valueAsNumber;
  return {
    sampling,
    speculation: speculation(fields.drafter.value, fields.max_draft.valueAsNumber),
    reasoning: fields.reasoning.checked ? {} : { reasoning: "off" },
    system: fields.system.value.trim(),
    compare: fields.compare.checked,
    parallel: fields.order.value === "parallel",
  };
}

/** Shows a conversation's system prompt. */
export function showSystem(text) {
  form.elements.system.value = text;
}

/** A draft length without a drafter is sent for the server's default drafter. */
function speculation(drafter, length) {
  if (drafter === "off" || (drafter === "auto" && !length)) return drafter;
  return { ...(drafter !== "auto" && { drafter }), ...(length && { max_draft: length }) };
}

/** Returns true if all fields are valid. Otherwise, shows the first field that is not. */
export function valid() {
  if (form.checkValidity()) return true;
  panel.toggle(true);
  return form.reportValidity();
}

/** Opens the settings at the limit of a reply. */
export function showLimit() {
  panel.toggle(true);
  form.elements.max_tokens.select();
}

/** Offers the model's drafters, and shows its recommended sampling in the fields that are empty. */
export function offer({ id, paceline: { drafters = [], guarantee, context_length: room, sampling = {}, loaded } = {} }) {
  for (const name of ["temperature", "top_p"]) form.elements[name].placeholder = sampling[name] ?? "auto";
  const select = form.elements.drafter;
  const chosen = select.value;
  const off = select.querySelector("[value=off]");
  for (const option of [...select.options]) if (!["auto", "off"].includes(option.value)) option.remove();
  // "auto" is already in the list.
  off.before(...drafters.filter((name) => name !== "auto").map((name) => make("option", "", name)));
  select.value = chosen;
  if (!select.value) select.value = "auto";
  const exact = guarantee === "bits" ? "bit for bit" : "up to rounding";
  $("#promise").textContent = loaded === false
    ? `${id} is loaded when you send the first message. Then its drafters are listed.`
    : "Same prompt, seed and settings: the same text, with or without speculation" +
      (guarantee ? ` (exact ${exact}).` : ".") +
      (room ? ` Context: ${room.toLocaleString("en")} tokens.` : "");
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
  panel = new Panel($("#settings"), $("#settings-button"), "(min-width: 75rem)");
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
    const next = dark() ? "light" : "dark";
    $("#theme").replaceChildren(icon(next));
    $("#theme").setAttribute("aria-label", dark() ? "Light theme" : "Dark theme");
    $("#theme").title = dark() ? "Light theme" : "Dark theme";
  };
  $("#theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept.set("theme", root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}
