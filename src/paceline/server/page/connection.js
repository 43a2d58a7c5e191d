// The connection to the server: its models, and the key that it may require.
import { keepKey } from "./api.js";
import { $ } from "./dom.js";
import * as models from "./models.js";

const form = $("#key-form");
const WRONG_KEY = "The server does not accept this key. Enter a key that it was started with: --api-key or PACELINE_API_KEY.";

/** Asks the server for its models, and the user for a key if necessary. Returns true if there is a model. `wanted`: its id. */
export async function connect(wanted) {
  try {
    await models.refresh(wanted);
    showStatus(models.chosen() ? "" : "The server has no models.");
    form.hidden = true;
    return Boolean(models.chosen());
  } catch (error) {
    if (error.status === 401) askKey();
    else showStatus(error.message);
    return false;
  }
}

export function showStatus(text) {
  $("#status").textContent = text;
}

export function askKey() {
  // Show no error before the first key was tried.
  $("#key-error").textContent = form.hidden ? "" : WRONG_KEY;
  form.hidden = false;
  $("#key").focus();
}

/** `connected`: called once the server has accepted a key. */
export function start(connected) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    keepKey($("#key").value);
    $("#key").value = "";
    if (await connect()) connected();
  });
}
