// The feed of the server.
import { byId, isNumber, mib } from "./elements.js";
import { showStates } from "./expert_map.js";
import { showFigures } from "./figures.js";
import { headers, readEvents, server } from "./server.js";

const feed = { control: null, wait: 1000 };

function bytesOf(text) {
  return Uint8Array.from(atob(text), sign => sign.charCodeAt(0));
}

/** Show one event of the feed. The first one has the properties, which `readServer` has read. */
function takeSnapshot(found) {
  if (found.states === undefined) return;
  showFigures(found);
  if (isNumber(found.memory_bytes)) {
    byId("memory").textContent = mib(found.memory_bytes) + (isNumber(found.budget_bytes) ? " of " + mib(found.budget_bytes) : "");
  }
  byId("queue").textContent = !found.running && !found.waiting ? "idle" : found.running + " running, " + found.waiting + " waiting";
  if (typeof found.states === "string") showStates(bytesOf(found.states));
}

/** Follow the feed while the page is seen. After an error, wait and try again. */
export async function follow() {
  if (feed.control || document.hidden) return;
  const control = feed.control = new AbortController();
  try {
    const response = await fetch("/v1/moec/events", { headers: headers(), signal: control.signal });
    if (!response.ok) throw new Error("no feed");
    server.hasFeed = true;
    feed.wait = 1000;
    await readEvents(response, data => takeSnapshot(JSON.parse(data)));
  } catch { /* a feed that is gone is tried again */ }
  server.hasFeed = false;
  feed.control = null;
  if (!document.hidden) {
    setTimeout(follow, feed.wait);
    feed.wait = Math.min(30000, 2 * feed.wait);
  }
}

/** End the feed until it is followed again. */
export function unfollow() {
  if (feed.control) feed.control.abort();
}
