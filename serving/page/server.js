// Requests to the server, and what is known about it.
import { byId } from "./elements.js";

/**
 * What the page knows about the server.
 * props: answer of /props. constants: bits and popularity of each expert, in the order of the feed.
 * hasFeed: whether the feed is read now.
 */
export const server = { props: {}, constants: {}, hasFeed: false };

/** Return the headers of a request, with the key that the user typed. */
export function headers() {
  const key = byId("key").value.trim();
  return key ? { "Content-Type": "application/json", Authorization: "Bearer " + key } : { "Content-Type": "application/json" };
}

/** Call `take` with the data of each server-sent event, and `hear` with each comment. */
export async function readEvents(response, take, hear) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const piece = await reader.read();
    rest += piece.done ? decoder.decode() + "\n\n" : decoder.decode(piece.value, { stream: true });
    const events = rest.split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart()).join("\n");
      if (data) take(data);
      else if (hear && event.startsWith(":")) hear(event.slice(1).trim());
    }
    if (piece.done) return;
  }
}

/** Ask for what does not change. Throws an error with the text for the user. */
export async function readServer() {
  try {
    const response = await fetch("/props", { headers: headers() });
    if (!response.ok) throw new Error(await problemOf(response));
    server.props = await response.json();
    const facts = await fetch("/v1/moec/experts", { headers: headers() });
    if (facts.ok) server.constants = await facts.json();
  } catch (error) {
    throw error instanceof TypeError ? new Error("the server cannot be reached") : error;
  }
}

/** Return what an answer that is an error tells. */
export async function problemOf(response) {
  let told = "the server answers " + response.status;
  try {
    const body = await response.json();
    if (body.error && body.error.message) told = String(body.error.message);
  } catch { /* the status tells enough */ }
  const wait = response.headers.get("Retry-After");
  return wait && response.status === 429 ? told + " (try again in " + wait + " s)" : told;
}
