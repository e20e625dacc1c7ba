// The figures of the run.
import { MIB, byId, isNumber, make, percent } from "./elements.js";
import { server } from "./server.js";

function show(id, value, text) {
  if (isNumber(value)) byId(id).textContent = text(value);
}

/** Show the figures that an answer or the feed tells. */
export function showFigures(found) {
  if (found.running !== 0) show("speed", found.tokens_per_s, value => value.toFixed(1) + " tokens/s");  // else it stays
  show("ttft", found.ttft_ms, value => value < 1000 ? value.toFixed(0) + " ms" : (value / 1000).toFixed(2) + " s");
  show("hits", found.hit_rate, percent);
  show("read", found.mib_per_token, value => value.toFixed(2) + " MiB");
  show("read", found.bytes_read_per_token, value => (value / MIB).toFixed(2) + " MiB");
  show("waiting", found.waiting_share, percent);
}

/** Show the timings of an answer. With a feed, the other figures are those of the server. */
export function showTimings(timings) {
  showFigures(server.hasFeed ? { tokens_per_s: timings.tokens_per_s, ttft_ms: timings.ttft_ms } : timings);
}

/** Show the mode of the run. The word LOSSY stands out. */
export function showMode(mode) {
  const line = byId("mode");
  line.hidden = !mode;
  line.replaceChildren("mode: ", ...String(mode || "").split(/(LOSSY)/).map(part => part === "LOSSY" ? make("strong", { textContent: part }) : part));
}
