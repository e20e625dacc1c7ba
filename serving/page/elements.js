// Elements of the page, and numbers as people read them.

export const MIB = 1 << 20;

export const byId = id => document.getElementById(id);

/** Return a new element with properties and children. Texts become text nodes. */
export function make(name, properties, ...children) {
  const element = document.createElement(name);
  Object.assign(element, properties || {});
  element.append(...children.filter(child => child !== null));
  return element;
}

/** Return a button. press: called on a click. title: hint, or nothing. */
export function button(text, press, title) {
  const made = make("button", { type: "button", textContent: text, title: title || "" });
  made.addEventListener("click", press);
  return made;
}

/** Tell the user what happens, below the conversation. */
export function say(text) {
  byId("status").textContent = text;
}

/** Put a text on the clipboard. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that is not served from this machine has no clipboard
    const area = make("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("copied");
}

export const percent = share => (100 * share).toFixed(1) + " %";
export const isNumber = value => typeof value === "number" && Number.isFinite(value);

/** Return a number of bytes as text. */
export function mib(bytes) {
  return bytes >= 1024 * MIB ? (bytes / MIB / 1024).toFixed(2) + " GiB" : (bytes / MIB).toFixed(0) + " MiB";
}
