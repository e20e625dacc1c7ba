// The conversation: turns, their answers, and what the user does with them.
import { button, byId, copy, make, say } from "./elements.js";
import { showTimings } from "./figures.js";
import { render } from "./markdown.js";
import { headers, problemOf, readEvents, server } from "./server.js";

const PLAIN_TOKENS = 512;  // without a limit, a completion has 16 tokens
export const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let turns = [], running = null;

/** Keep the conversation in this tab. */
export function store() {
  try {
    sessionStorage.setItem("moec", JSON.stringify({ turns: turns, system: byId("system").value,
      settings: SETTINGS.map(name => byId(name).value) }));
  } catch { /* a full or forbidden store loses nothing that is shown */ }
}

/** Take the conversation that this tab kept. */
export function restore() {
  try {
    const known = JSON.parse(sessionStorage.getItem("moec") || "{}");
    turns = (known.turns || []).filter(turn => typeof turn.content === "string");
    byId("system").value = known.system || "";
    SETTINGS.forEach((name, at) => { byId(name).value = (known.settings || [])[at] || ""; });
  } catch { turns = []; }
}

/** Return the turns as one text, for a bundle without a chat template. */
function plainText(messages) {
  return messages.reduce((text, turn) => text + (turn.role === "user" && text && !text.endsWith("\n") ? "\n" : "") + turn.content, "");
}

/** Return path and body of the request for the next answer. */
function requestBody(messages) {
  const body = { stream: true };
  for (const name of SETTINGS) {
    const value = byId(name).value.trim();
    if (value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  if (server.props.has_chat_template === false) return { path: "/v1/completions", body: { max_tokens: PLAIN_TOKENS, ...body, prompt: plainText(messages) } };
  const system = byId("system").value.trim();
  const said = messages.map(turn => ({ role: turn.role, content: turn.content }));
  return { path: "/v1/chat/completions", body: { ...body, messages: system ? [{ role: "system", content: system }, ...said] : said } };
}

/** Ask for the answer to all turns so far, and stream it into a new turn. */
async function answer() {
  if (running) return;
  const asked = requestBody(turns), turn = { role: "assistant", content: "", thought: "" };
  turns.push(turn);
  const control = new AbortController();
  running = { control: control, turn: turn };
  drawTurns();
  setBusy(true);
  say("waiting for the first token");
  let isDue = false, pause = 0;
  const show = () => {
    const began = performance.now();
    isDue = false;
    fillAnswer(turn);
    pause = 4 * (performance.now() - began);  // a long text takes at most a fifth of the time
  };
  try {
    const response = await fetch(asked.path, { method: "POST", headers: headers(), body: JSON.stringify(asked.body), signal: control.signal });
    if (!response.ok) throw new Error(await problemOf(response));
    await readEvents(response, data => {
      if (data === "[DONE]") return;
      take(turn, JSON.parse(data));
      if (!isDue) {
        isDue = true;
        setTimeout(() => requestAnimationFrame(show), pause);
      }
    }, comment => {
      const place = /^queue (\d+)$/.exec(comment);
      say(place ? "place " + place[1] + " in the queue; Esc leaves it" : "the prompt is computed; Esc stops");
    });
    if (!turn.reason && !turn.problem) turn.problem = "the connection ended before the answer did";
    say("the answer is complete");
  } catch (error) {
    if (control.signal.aborted) say("stopped");
    else turn.problem = error instanceof TypeError ? "the server cannot be reached" : error.message;
    if (control.signal.aborted) turn.reason = "stopped";
  }
  if (turn.problem) say("the answer failed");
  running = null;
  setBusy(false);
  store();
  drawTurns();
  byId("input").focus();
}

/** Take one piece of an answer. */
function take(turn, piece) {
  if (piece.error) turn.problem = String(piece.error.message || "the request failed");
  const choice = (piece.choices || [])[0];
  if (choice) {
    const delta = choice.delta || {};
    turn.thought += delta.reasoning_content || "";
    turn.content += delta.content || choice.text || "";
    if (choice.finish_reason) turn.reason = choice.finish_reason;
    if (turn.content || turn.thought) say("answering; Esc stops");
  }
  if (piece.timings) {
    turn.timings = piece.timings;
    showTimings(piece.timings);
  }
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
}

/** End the answer that runs. */
export function stop() {
  if (running) running.control.abort();
}

/** Send the typed message. */
export function send() {
  const text = byId("input").value;
  if (running || !text.trim()) return;
  turns.push({ role: "user", content: text });
  byId("input").value = "";
  answer();
}

function regenerate() {
  if (running) return;
  while (turns.length && turns[turns.length - 1].role === "assistant") turns.pop();
  if (turns.length) answer();
}

/** Let the user change a message. Turns after it are dropped when it is sent. */
function edit(index, article) {
  const area = make("textarea", { value: turns[index].content, rows: 3, ariaLabel: "Change the message" });
  const finish = () => {
    if (running || !area.value.trim()) return;
    turns = turns.slice(0, index);
    turns.push({ role: "user", content: area.value });
    answer();
  };
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); finish(); }
    if (event.key === "Escape") { event.stopPropagation(); drawTurns(); }
  });
  article.replaceChildren(area, make("div", { className: "tools" }, button("Send", finish), button("Cancel", drawTurns)));
  area.focus();
}

function countsOf(turn) {
  const known = turn.timings || {}, parts = [];
  if (turn.reason === "stopped") parts.push("stopped");
  if (turn.reason === "length") parts.push("cut at the limit or the end of the context");
  if (known.completion_tokens) parts.push(known.completion_tokens + " tokens");
  if (known.tokens_per_s) parts.push(known.tokens_per_s.toFixed(1) + " tokens/s");
  if (known.cached_tokens) parts.push(known.cached_tokens + " of " + known.prompt_tokens + " prompt tokens were kept");
  return parts.join(" · ");
}

function answerNode(turn, isLast) {
  const article = make("article", { className: "assistant" }, make("header", { textContent: byId("model").textContent || "model" }));
  turn.node = null;
  const thought = make("details", { className: "thought", hidden: true }, make("summary", { textContent: "Thinking" }), make("div"));
  const text = make("div", { className: "markdown" }), problem = make("p", { className: "problem", hidden: true });
  article.append(thought, text, problem);
  Object.defineProperty(turn, "node", { value: { article: article, thought: thought, text: text, problem: problem }, enumerable: false, configurable: true });
  if (!running || running.turn !== turn) {
    const tools = make("div", { className: "tools" }, button("Copy", () => copy(turn.content)));
    if (isLast) tools.append(button("Regenerate", regenerate));
    tools.append(make("span", { className: "counts", textContent: countsOf(turn) }));
    article.append(tools);
  } else {
    article.classList.add("busy");
    article.setAttribute("aria-busy", "true");
  }
  return article;
}

function fillAnswer(turn) {
  if (!turn.node) return;
  const log = byId("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  turn.node.thought.hidden = !turn.thought;
  turn.node.thought.lastChild.textContent = turn.thought;
  render(turn.node.text, turn.content);
  turn.node.problem.hidden = !turn.problem;
  turn.node.problem.textContent = turn.problem || "";
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Show all turns. */
export function drawTurns() {
  const log = byId("log");
  log.replaceChildren();
  if (!turns.length) {
    const kind = server.props.has_chat_template === false ? "This bundle has no chat template: the model continues the text as it is written. " : "";
    log.append(make("p", { className: "empty", textContent: kind + "Messages stay on this machine. Ctrl+Shift+O begins a new chat, Esc stops an answer." }));
  }
  turns.forEach((turn, index) => {
    if (turn.role === "assistant") {
      log.append(answerNode(turn, index === turns.length - 1));
      fillAnswer(turn);
      return;
    }
    const article = make("article", { className: "user" }, make("header", { textContent: "You" }), make("div", { className: "text", textContent: turn.content }));
    const tools = make("div", { className: "tools" }, button("Copy", () => copy(turn.content)), button("Edit", () => edit(index, article)));
    if (!running) article.append(tools);
    log.append(article);
  });
  log.scrollTop = log.scrollHeight;
}

/** Forget the conversation. */
export function newChat() {
  stop();
  turns = [];
  store();
  drawTurns();
  byId("input").focus();
}
