// Pictures of a prompt: pasted, dropped or chosen, within the limits of a request.
// @ts-check

import { el, keyed } from "../dom.js";
import { icon } from "./items/icons.js";
import { size } from "./items/words.js";

const TYPES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);
const BYTES_MAX = 5_000_000;
/** The limits keep all pictures together below the server's limit for one request. */
const COUNT_MAX = 4;

export class Attachments {
  /** @param {{changed: () => void, say: (text: string, kind?: string) => void}} given */
  constructor(given) {
    this.given = given;
    /** @type {{id: number, name: string, mimeType: string, data: string}[]} */
    this.list = [];
    this.count = 0;
    /** The number of calls of `add` that are still reading. `read` resolves after the last one. */
    this.reading = 0;
    /** @type {Promise<void>} */
    this.read = Promise.resolve();
    this.isOver = false;
    this.node = el("div", { class: "attachments" });
  }

  destroy() {
    this.isOver = true;
  }

  /**
   * Take the files of pasted or dropped data.
   * @param {DataTransfer|null} transfer
   * @returns {boolean} whether there were any
   */
  take(transfer) {
    const files = [...(transfer?.files ?? [])];
    if (!files.length) return false;
    this.add(files);
    return true;
  }

  /**
   * Read the files one after the other, so that the pictures keep the order in which they were
   * added.
   * @param {File[]} files
   */
  add(files) {
    this.reading += 1;
    this.read = this.read.then(() => this.#add(files)).finally(() => (this.reading -= 1));
  }

  /** @param {File[]} files */
  async #add(files) {
    for (const file of files) {
      if (!TYPES.has(file.type))
        this.given.say(`Cannot attach ${file.name || "this file"}: agents accept PNG, JPEG, GIF and WebP.`, "error");
      else if (file.size > BYTES_MAX)
        this.given.say(
          `${file.name || "The picture"} has ${size(file.size)}; at most ${size(BYTES_MAX)} can be sent.`,
          "error",
        );
      else if (this.list.length >= COUNT_MAX)
        this.given.say(`At most ${COUNT_MAX} pictures can be sent in one message.`, "error");
      else {
        const data = await base64(file);
        if (this.isOver) return;
        this.list = [...this.list, { id: (this.count += 1), name: file.name || "picture", mimeType: file.type, data }];
      }
    }
    this.#draw();
    this.given.changed();
  }

  /** @param {any[]} images */
  set(images) {
    this.list = images
      .filter((one) => TYPES.has(one?.mimeType) && typeof one.data === "string")
      .slice(0, COUNT_MAX)
      .map((one) => ({ name: "picture", ...one, id: (this.count += 1) }));
    this.#draw();
  }

  #draw() {
    keyed(
      this.node,
      this.list,
      (one) => one.id,
      (one) =>
        el(
          "figure",
          { class: "attachment", dataset: { attachment: one.name } },
          el("img", { src: `data:${one.mimeType};base64,${one.data}`, alt: one.name }),
          el(
            "button",
            {
              class: "icon-button",
              type: "button",
              "aria-label": `Remove ${one.name}`,
              on: { click: () => this.#remove(one.id) },
            },
            icon("cross"),
          ),
        ),
    );
  }

  /** @param {number} id */
  #remove(id) {
    this.list = this.list.filter((one) => one.id !== id);
    this.#draw();
    this.given.changed();
  }
}

/**
 * @param {Blob} file
 * @returns {Promise<string>}
 */
async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  // In chunks: the number of arguments of a function call is limited.
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}
