// The models of the server, and the chosen model.
import { models as fetchModels } from "./api.js";
import { $, kept, make } from "./dom.js";
import * as settings from "./settings.js";

const select = $("#model");
let all = [];

/** The chosen model as the server describes it; null before the server has been reached. */
export const chosen = () => all.find(({ id }) => id === select.value) ?? null;

/** Asks the server for its models. Keeps the choice, or chooses the wanted model. Throws the errors of `request`. */
export async function refresh(wanted) {
  const before = select.value || wanted || kept.get("model");
  all = await fetchModels();
  select.replaceChildren(...all.map(option));
  if (!choose(before)) choose((all.find(({ paceline }) => paceline?.loaded !== false) ?? all[0])?.id);
  select.disabled = all.length < 2;
  if (chosen()) settings.offer(chosen());
}

function option({ id, paceline }) {
  const element = make("option", "", paceline?.loaded === false ? `${id} (not loaded)` : id);
  element.value = id;
  return element;
}

/** Chooses a model if the server has it. Returns true if so. */
export function choose(id) {
  if (!all.some((model) => model.id === id)) return false;
  select.value = id;
  settings.offer(chosen());
  return true;
}

export function start() {
  select.addEventListener("change", () => {
    kept.set("model", select.value);
    settings.offer(chosen());
  });
}
