// Text files and images that are sent with a message: chosen, dropped or pasted. An image is {name, text: "", image: data URL}.
import { $, button, make } from "./dom.js";
import { chosen } from "./models.js";

const LARGEST = 1_000_000; // Bytes of a text file.
const LARGEST_IMAGE = 4_000_000; // Bytes of an image that is sent as it is.
const SIDE = 2048; // Pixels to which a larger image is scaled down.
const picker = $("#picker");
let files = [];

/** The text of a message with its files, each in a code block. */
export function withFiles(prompt, files = []) {
  const blocks = files.filter(({ image }) => !image).map(({ name, text }) => {
    const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, ...(prompt ? [prompt] : [])].join("\n\n");
}

/** The content of a message: text, or parts if there are images. */
export function content(prompt, files = []) {
  const text = withFiles(prompt, files);
  const images = files.filter(({ image }) => image).map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return images.length ? [...images, { type: "text", text }] : text;
}

export const attached = () => files.length > 0;

/** Returns the attached files, and detaches them. */
export function take() {
  const taken = files;
  files = [];
  show();
  return taken;
}

/** The elements of a message's files: images, and names that open to texts. */
export const shown = (files) =>
  files.map(({ name, text, image }) => {
    if (image) return thumbnail(name, image);
    const body = make("pre", "", text);
    body.tabIndex = 0;
    return make("details", "file", make("summary", "", name), body);
  });

function thumbnail(name, image) {
  const picture = make("img", "thumbnail");
  Object.assign(picture, { src: image, alt: name, title: name });
  return picture;
}

async function add(list) {
  const problems = [];
  for (const file of list) {
    try {
      files.push({ name: file.name, ...(file.type.startsWith("image/") ? await readImage(file) : { text: await read(file) }) });
    } catch (error) {
      problems.push(error.message);
    }
  }
  show(problems.join(" "));
  $("#prompt").focus();
}

/** Returns true if the chosen model may see images. This is not known before the model is loaded. */
function sees() {
  const { loaded, modalities = [] } = chosen()?.paceline ?? {};
  return loaded === false || modalities.includes("image");
}

async function readImage(file) {
  if (!sees()) {
    throw new Error(`${file.name} is an image, and the models of this server read text only. Describe it in words instead.`);
  }
  const refusal = new Error(`${file.name} is not an image that this browser can show. Save it as PNG or JPEG.`);
  const bitmap = await createImageBitmap(file).catch(() => { throw refusal; });
  const known = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"].includes(file.type);
  const blob = known && file.size <= LARGEST_IMAGE ? file : await scaled(bitmap);
  bitmap.close();
  return { text: "", image: await dataUrl(blob) };
}

function scaled(bitmap) {
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

async function read(file) {
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
    return make("li", "", ...(file.image ? [thumbnail(file.name, file.image)] : []), make("span", "", file.name), drop);
  }));
}

export function start() {
  $("#attach").append(button("Attach files", "attach", () => picker.click()));
  picker.addEventListener("change", async () => {
    await add([...picker.files]);
    picker.value = ""; // The same file may be chosen again.
  });
  $("#prompt").addEventListener("paste", (event) => {
    const { files: pasted, types } = event.clipboardData;
    // Some programs copy a text together with an image of the text.
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
