// Text files that go with a message: chosen, dropped or pasted.
import { $, button, make } from "./dom.js";

const LARGEST = 1_000_000; // Bytes of a file.
const picker = $("#picker");
let files = [];

/** The text of a message with its files, each in a code block. */
export function withFiles(prompt, files = []) {
  const blocks = files.map(({ name, text }) => {
    const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, ...(prompt ? [prompt] : [])].join("\n\n");
}

export const attached = () => files.length > 0;

/** Returns the attached files, and detaches them. */
export function take() {
  const taken = files;
  files = [];
  show();
  return taken;
}

/** The elements of a message's files, which open to their texts. */
export const shown = (files) =>
  files.map(({ name, text }) => {
    const body = make("pre", "", text);
    body.tabIndex = 0;
    return make("details", "file", make("summary", "", name), body);
  });

async function add(list) {
  const problems = [];
  for (const file of list) {
    try {
      files.push({ name: file.name, text: await read(file) });
    } catch (error) {
      problems.push(error.message);
    }
  }
  show(problems.join(" "));
  $("#prompt").focus();
}

async function read(file) {
  if (file.type.startsWith("image/")) {
    throw new Error(`${file.name} is an image, and the models of this server read text only. Describe it in words instead.`);
  }
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than 1 MB. Attach a part of it.`);
  const refusal = new Error(`${file.name} is not a text file in UTF-8. Copy its text into the message instead.`);
  const text = await file.arrayBuffer().then((data) => new TextDecoder("utf-8", { fatal: true }).decode(data)).catch(() => null);
  if (text === null || text.includes("\0")) throw refusal;
  return text;
}

function show(problem = "") {
  $("#files-note").textContent = problem;
  $("#files").replaceChildren(...files.map((file) => {
    const drop = button(`Remove ${file.name}`, "close", () => {
      files = files.filter((other) => other !== file);
      show();
      $("#prompt").focus();
    });
    return make("li", "", make("span", "", file.name), drop);
  }));
}

export function start() {
  $("#attach").append(button("Attach text files", "attach", () => picker.click()));
  picker.addEventListener("change", async () => {
    await add([...picker.files]);
    picker.value = ""; // The same file may be chosen again.
  });
  $("#prompt").addEventListener("paste", (event) => {
    const { files: pasted, types } = event.clipboardData;
    // Some programs copy a text together with an image of it.
    if (!pasted.length || types.includes("text/plain")) return;
    event.preventDefault();
    add([...pasted]);
  });
  addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}
