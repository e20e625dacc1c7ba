// The chat page: a conversation, the figures of the run, and a map of layers x experts.
// Everything that a model writes is untrusted: see markdown.js.
import { SETTINGS, drawTurns, newChat, restore, send, stop, store } from "./conversation.js";
import { byId, say } from "./elements.js";
import { listen, redraw } from "./expert_map.js";
import { follow, unfollow } from "./feed.js";
import { showMode } from "./figures.js";
import { readServer, server } from "./server.js";

/** Show what the server tells about its bundle. */
async function readProps() {
  try {
    await readServer();
  } catch (error) {
    say(error.message);
    return;
  }
  const props = server.props;
  byId("model").textContent = String(props.model || "");
  byId("model").title = String(props.verdict || "");
  document.title = (props.model ? props.model + " · " : "") + "moec";
  showMode(props.mode);
  for (const [name, value] of Object.entries(props.sampling || {})) {
    byId(name).placeholder = name === "top_k" && !value ? "all" : String(value);
  }
  byId("system").disabled = props.has_chat_template === false;
  if (props.has_chat_template === false) byId("system").placeholder = "needs a chat template, which this bundle lacks";
  drawTurns();
  redraw();
}

byId("form").addEventListener("submit", event => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", newChat);
byId("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") stop();
  if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) { event.preventDefault(); newChat(); }
});
for (const name of [...SETTINGS, "system"]) byId(name).addEventListener("change", store);
byId("key").addEventListener("change", () => { readProps(); follow(); });
for (const name of ["experts", "settings"]) byId(name).addEventListener("toggle", () => {
  redraw();
  byId("log").scrollTop = byId("log").scrollHeight;
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) unfollow();
  else follow();
});
if (window.matchMedia("(max-width: 60rem)").matches) byId("experts").open = false;
listen();
restore();
drawTurns();
readProps();
follow();
byId("input").focus();
