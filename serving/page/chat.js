"use strict";
// The chat page: a conversation, the figures of the run, and a map of layers x experts.
// Everything that a model writes is untrusted. It becomes text nodes; no text is ever parsed as HTML.
(function () {
  const byId = id => document.getElementById(id);
  const MIB = 1 << 20;

  // ---- Elements ----

  /** Return a new element with properties and children. Texts become text nodes. */
  function make(name, properties, ...children) {
    const element = document.createElement(name);
    Object.assign(element, properties || {});
    element.append(...children.filter(child => child !== null));
    return element;
  }

  function button(text, press, title) {
    const made = make("button", { type: "button", textContent: text, title: title || "" });
    made.addEventListener("click", press);
    return made;
  }

  function say(text) {
    byId("status").textContent = text;
  }

  async function copy(text) {
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

  // ---- Markdown ----
  // Blocks are found line by line, marks inside a block by one pass. Both take linear time and bounded depth.

  // Each scan for the end of a mark is bounded, and so is the number of scans in a block that find none.

  const MAX_DEPTH = 8, MAX_SPAN = 4000, MAX_MISSES = 500;
  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/, HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
  const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/s, QUOTE = /^ {0,3}>\s?/, RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;

  /** Return the cells of a line of a table. */
  const cellsOf = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

  /** Return whether a table begins with a line. */
  function beginsTable(lines, at) {
    return at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].includes("-")
      && cellsOf(lines[at + 1].slice(0, MAX_SPAN)).every(cell => /^:?-+:?$/.test(cell));
  }

  /** Split a text into blocks: {kind, lines}. */
  function blocksOf(lines) {
    const blocks = [];
    let at = 0;
    while (at < lines.length) {
      const line = lines[at], start = at, fence = FENCE.exec(line);
      let kind = "paragraph";
      at += 1;
      if (!line.trim()) continue;
      if (fence) {
        kind = "code";
        while (at < lines.length && !(lines[at].trim().startsWith(fence[1]) && !lines[at].trim().slice(fence[1].length).trim())) at += 1;
        at += 1;
      } else if (HEADING.test(line)) kind = "heading";
      else if (RULE.test(line)) kind = "rule";
      else if (QUOTE.test(line)) {
        kind = "quote";
        while (at < lines.length && QUOTE.test(lines[at])) at += 1;
      } else if (ITEM.test(line)) {
        kind = "list";
        while (at < lines.length && (ITEM.test(lines[at]) || /^\s{2,}\S/.test(lines[at])
          || (!lines[at].trim() && at + 1 < lines.length && (ITEM.test(lines[at + 1]) || /^\s{2,}\S/.test(lines[at + 1]))))) at += 1;
      } else if (beginsTable(lines, start)) {
        kind = "table";
        while (at < lines.length && lines[at].includes("|")) at += 1;
      } else {
        while (at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !HEADING.test(lines[at]) && !QUOTE.test(lines[at])
          && !ITEM.test(lines[at]) && !RULE.test(lines[at]) && !beginsTable(lines, at)) at += 1;
      }
      blocks.push({ kind: kind, lines: lines.slice(start, at) });
    }
    return blocks;
  }

  /** Return the element of a block. */
  function blockNode(block, depth) {
    const lines = block.lines;
    if (block.kind === "rule") return make("hr");
    if (block.kind === "code") return codeNode(lines);
    if (block.kind === "heading") {
      const found = HEADING.exec(lines[0]);
      return make("h" + Math.min(4, found[1].length + 1), {}, ...inline(found[2].trimEnd(), 0));
    }
    if (block.kind === "quote") {
      const inner = lines.map(line => line.replace(QUOTE, ""));
      return make("blockquote", {}, ...blockNodes(inner, depth + 1));
    }
    if (block.kind === "list") return listNode(lines, depth);
    if (block.kind === "table") return tableNode(lines);
    return make("p", {}, ...inline(lines.join("\n"), 0));
  }

  /** Return the elements of lines. Beyond the greatest depth they are plain text. */
  function blockNodes(lines, depth) {
    if (depth > MAX_DEPTH) return [make("p", {}, lines.join("\n"))];
    return blocksOf(lines).map(block => blockNode(block, depth));
  }

  function codeNode(lines) {
    const mark = FENCE.exec(lines[0])[1], last = lines[lines.length - 1].trim();
    const isClosed = lines.length > 1 && last.startsWith(mark) && !last.slice(mark.length).trim();
    const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    const bar = make("div", {}, make("span", { textContent: FENCE.exec(lines[0])[2].slice(0, 40) || "text" }));
    bar.append(button("Copy", () => copy(text), "Copy this block"));
    return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0 }, make("code", { textContent: text })));
  }

  function listNode(lines, depth) {
    const first = ITEM.exec(lines[0]), indent = first[1].length;
    const list = make(first[3] === undefined ? "ul" : "ol");
    if (first[3] !== undefined) list.start = Number(first[3]);
    let own = [];
    const finish = () => {
      if (!own.length) return;
      const simple = own.length === 1;
      list.append(make("li", {}, ...(simple ? inline(own[0], 0) : itemNodes(own, depth))));
    };
    for (const line of lines) {
      const found = ITEM.exec(line);
      if (found && found[1].length <= indent + 1) {
        finish();
        own = [found[4]];
      } else own.push(line.replace(/^\s{1,4}/, ""));
    }
    finish();
    return list;
  }

  /** Return the content of a list item with several lines: its first paragraph without a box, then blocks. */
  function itemNodes(lines, depth) {
    const nodes = blockNodes(lines, depth + 1);
    return nodes.length && nodes[0].tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
  }

  function tableNode(lines) {
    const row = (line, name) => make("tr", {}, ...cellsOf(line).slice(0, 64).map(cell => make(name, {}, ...inline(cell, 0))));
    const body = lines.slice(2).map(line => row(line, "td"));
    return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...body)));
  }

  const MARKS = /`+|\*\*|__|~~|\*|_|!?\[|\\[\\`*_~[\](){}#+.!|<>-]/g;

  /** Return nodes of a text with code, emphasis and links. A mark without its end is text. */
  function inline(text, depth) {
    const nodes = [];
    let at = 0, from = 0, misses = 0;
    const flush = end => { if (end > from) nodes.push(text.slice(from, end)); };
    MARKS.lastIndex = 0;
    for (let found; (found = MARKS.exec(text)); MARKS.lastIndex = at) {
      const mark = found[0], start = found.index;
      at = start + mark.length;
      if (mark[0] === "\\") {
        flush(start);
        nodes.push(mark[1]);
        from = at;
        continue;
      }
      if (depth >= MAX_DEPTH || misses > MAX_MISSES) continue;
      const made = mark.endsWith("[") ? linkAt(text, start, at, depth) : spanAt(text, mark, start, at, depth);
      if (!made) {
        misses += 1;
        continue;
      }
      flush(start);
      nodes.push(made.node);
      at = from = made.end;
    }
    flush(text.length);
    return nodes;
  }

  function spanAt(text, mark, start, after, depth) {
    if (mark[0] === "_" && /\w/.test(text[start - 1] || "")) return null;
    if (mark[0] !== "`" && /\s/.test(text[after] || " ")) return null;
    const near = text.slice(after, after + MAX_SPAN), isSingle = mark === "*" || mark === "_";
    let size = near.indexOf(mark);
    while (isSingle && size >= 0 && near[size + 1] === mark) size = near.indexOf(mark, size + 2);
    if (size <= 0) return null;
    const inner = near.slice(0, size), end = after + size + mark.length;
    if (mark[0] === "`") return { node: make("code", { textContent: inner.trim() || inner }), end: end };
    const name = mark === "~~" ? "del" : isSingle ? "em" : "strong";
    return { node: make(name, {}, ...inline(inner, depth + 1)), end: end };
  }

  /** Return a link. Only web and mail addresses become one. A picture becomes a link, because nothing is loaded. */
  function linkAt(text, start, after, depth) {
    const close = text.slice(after, after + MAX_SPAN).indexOf("](");
    if (close < 0) return null;
    const label = text.slice(after, after + close), rest = text.slice(after + close + 2, after + close + 2 + MAX_SPAN);
    const found = /^<?([^\s<>()]{1,2000})>?(?:\s+"[^"]{0,200}")?\)/.exec(rest);
    if (!found || label.includes("\n\n")) return null;
    const end = after + close + 2 + found[0].length;
    if (!/^(?:https?:\/\/|mailto:)/i.test(found[1])) return { node: make("span", {}, text.slice(start, end)), end: end };
    const shown = label ? inline(label, depth + 1) : [found[1]];
    const link = make("a", { href: found[1], title: found[1], target: "_blank", rel: "noopener noreferrer nofollow" }, ...shown);
    return { node: link, end: end };
  }

  /** Show a text in an element. Blocks that did not change keep their nodes, so that a stream costs little. */
  function render(element, text) {
    const blocks = blocksOf(text.split("\n")), known = element.blocks || [];
    let same = 0;
    const sources = blocks.map(block => block.kind + "\n" + block.lines.join("\n"));
    while (same < sources.length && sources[same] === known[same]) same += 1;
    while (element.childNodes.length > same) element.lastChild.remove();
    for (const block of blocks.slice(same)) element.append(blockNode(block, 0));
    element.blocks = sources;
  }

  // ---- Talking to the server ----

  let props = {};

  function headers() {
    const key = byId("key").value.trim();
    return key ? { "Content-Type": "application/json", Authorization: "Bearer " + key } : { "Content-Type": "application/json" };
  }

  /** Call `take` with the data of each server-sent event, and `hear` with each comment. */
  async function readEvents(response, take, hear) {
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

  async function problemOf(response) {
    let told = "the server answers " + response.status;
    try {
      const body = await response.json();
      if (body.error && body.error.message) told = String(body.error.message);
    } catch { /* the status tells enough */ }
    const wait = response.headers.get("Retry-After");
    return wait && response.status === 429 ? told + " (try again in " + wait + " s)" : told;
  }

  // ---- The conversation ----

  const PLAIN_TOKENS = 512;  // without a limit, a completion has 16 tokens
  const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
  let turns = [], running = null;

  function store() {
    try {
      sessionStorage.setItem("moec", JSON.stringify({ turns: turns, system: byId("system").value,
        settings: SETTINGS.map(name => byId(name).value) }));
    } catch { /* a full or forbidden store loses nothing that is shown */ }
  }

  function restore() {
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

  function requestBody(messages) {
    const body = { stream: true };
    for (const name of SETTINGS) {
      const value = byId(name).value.trim();
      if (value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
    }
    if (props.has_chat_template === false) return { path: "/v1/completions", body: { max_tokens: PLAIN_TOKENS, ...body, prompt: plainText(messages) } };
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

  function stop() {
    if (running) running.control.abort();
  }

  function send() {
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

  function drawTurns() {
    const log = byId("log");
    log.replaceChildren();
    if (!turns.length) {
      const kind = props.has_chat_template === false ? "This bundle has no chat template: the model continues the text as it is written. " : "";
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

  function newChat() {
    stop();
    turns = [];
    store();
    drawTurns();
    byId("input").focus();
  }

  // ---- Figures ----

  const percent = share => (100 * share).toFixed(1) + " %";
  const isNumber = value => typeof value === "number" && Number.isFinite(value);

  function show(id, value, text) {
    if (isNumber(value)) byId(id).textContent = text(value);
  }

  function showFigures(found) {
    if (found.running !== 0) show("speed", found.tokens_per_s, value => value.toFixed(1) + " tokens/s");  // else it stays
    show("ttft", found.ttft_ms, value => value < 1000 ? value.toFixed(0) + " ms" : (value / 1000).toFixed(2) + " s");
    show("hits", found.hit_rate, percent);
    show("read", found.mib_per_token, value => value.toFixed(2) + " MiB");
    show("read", found.bytes_read_per_token, value => (value / MIB).toFixed(2) + " MiB");
    show("waiting", found.waiting_share, percent);
  }

  /** Show the timings of an answer. With a feed, the other figures are those of the server. */
  function showTimings(timings) {
    showFigures(feed.isOpen ? { tokens_per_s: timings.tokens_per_s, ttft_ms: timings.ttft_ms } : timings);
  }

  function mib(bytes) {
    return bytes >= 1024 * MIB ? (bytes / MIB / 1024).toFixed(2) + " GiB" : (bytes / MIB).toFixed(0) + " MiB";
  }

  function showMode(mode) {
    const line = byId("mode");
    line.hidden = !mode;
    line.replaceChildren("mode: ", ...String(mode || "").split(/(LOSSY)/).map(part => part === "LOSSY" ? make("strong", { textContent: part }) : part));
  }

  // ---- The map of experts ----

  const STATES = [["absent", "on storage"], ["resident", "in memory"], ["hit", "hit"], ["miss", "missed"], ["ahead", "read ahead"],
    ["out", "left out by the compiler"]];
  // Cividis: even in lightness, and safe for the colour-blind.
  const RAMP = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
    [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
  const LEFT = 26;
  const map = { states: null, drawn: [], chosen: null, colours: [], width: 0, height: 0, cellWidth: 0, cellHeight: 0 };

  function ramp(share) {
    const at = Math.min(0.9999, Math.max(0, share)) * (RAMP.length - 1), low = Math.floor(at), part = at - low;
    return "rgb(" + RAMP[low].map((c, i) => Math.round(c + (RAMP[low + 1][i] - c) * part)).join(",") + ")";
  }

  let constants = {};  // bits and popularity of each expert, in the order of the feed

  const view = () => document.querySelector("input[name=view]:checked").value;
  const valuesOf = name => constants[name] || [];

  /** Return the least and the greatest value of a view, without experts that were left out. */
  function rangeOf(name) {
    const all = valuesOf(name).filter(value => isNumber(value) && value > 0);
    return [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), -Infinity)];
  }

  /** Return how each expert looks now, as one text per expert, in the order of layers. */
  function looks() {
    const name = view(), count = (props.experts || []).reduce((a, b) => a + b, 0), found = [];
    const [low, high] = name === "live" ? [0, 0] : rangeOf(name), values = valuesOf(name);
    for (let at = 0; at < count; at += 1) found.push(name === "live" ? map.colours[map.states ? map.states[at] : 0] || map.colours[0]
      : valueColour(name, values[at], low, high));
    return found;
  }

  /** Return the colour of a value on the scale of a view. Popularity has a logarithmic scale. */
  function valueColour(name, value, low, high) {
    if (!isNumber(value)) return map.colours[0];
    if (value <= 0) return name === "bits" ? map.colours[5] : ramp(0);
    if (!(high > low)) return ramp(0.5);
    return ramp(name === "popularity" ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  }

  /** Draw the cells that changed, or all of them. */
  function drawMap(isWhole) {
    const canvas = byId("map"), width = canvas.clientWidth, counts = props.experts || [];
    const rows = counts.filter(count => count > 0).length;
    if (!width || !rows || document.hidden) return;
    const scale = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    if (isWhole || width !== map.width) {
      const style = getComputedStyle(document.documentElement);
      map.colours = STATES.map(state => style.getPropertyValue("--" + state[0]).trim());
      map.ink = style.getPropertyValue("--ink");
      map.soft = style.getPropertyValue("--soft");
      map.paper = style.getPropertyValue("--paper");
      map.width = width;
      map.cellWidth = (width - LEFT) / Math.max(...counts);
      map.cellHeight = Math.max(5, Math.min(26, 440 / rows));
      map.height = Math.ceil(map.cellHeight * rows);
      canvas.style.height = map.height + "px";
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(map.height * scale);
      map.drawn = [];
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    if (!map.drawn.length) drawLabels(context, counts);
    const now = looks();
    let at = 0, row = 0;
    counts.forEach(count => {
      if (!count) return;
      for (let expert = 0; expert < count; expert += 1, at += 1) {
        if (now[at] !== map.drawn[at]) drawCell(context, row, expert, now[at]);
      }
      row += 1;
    });
    map.drawn = now;
    if (map.chosen) drawChosen(context);
  }

  function drawLabels(context, counts) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = map.soft;
    let row = 0;
    counts.forEach((count, layer) => {
      if (!count) return;
      const every = Math.ceil(13 / map.cellHeight);
      if (row % every === 0) context.fillText(String(layer), 2, (row + 0.5) * map.cellHeight + 0.5);
      row += 1;
    });
  }

  function drawCell(context, row, expert, colour) {
    const gap = map.cellWidth > 5 ? 1 : 0, x = LEFT + expert * map.cellWidth, y = row * map.cellHeight;
    context.fillStyle = map.paper;
    context.fillRect(x, y, map.cellWidth, map.cellHeight);
    context.fillStyle = colour;
    context.fillRect(x, y, map.cellWidth - gap, map.cellHeight - (map.cellHeight > 6 ? 1 : 0.5));
    if (colour === map.colours[5]) {
      context.fillStyle = map.soft;
      context.fillRect(x + map.cellWidth / 2 - 1, y + map.cellHeight / 2 - 1, 2, 2);
    }
  }

  function drawChosen(context) {
    for (const [width, colour] of [[5, map.paper], [2, map.ink]]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(LEFT + map.chosen.expert * map.cellWidth - 1, map.chosen.row * map.cellHeight, Math.max(3, map.cellWidth + 1), map.cellHeight - 1);
    }
  }

  /** Return the layers that have experts. */
  function expertLayers() {
    return (props.experts || []).map((count, layer) => ({ layer: layer, count: count })).filter(each => each.count > 0);
  }

  function choose(row, expert) {
    const layers = expertLayers();
    if (!layers[row] || expert < 0 || expert >= layers[row].count) return;
    map.chosen = { row: row, expert: expert };
    map.drawn = [];
    drawMap(true);
    tell();
  }

  function tell() {
    const layers = expertLayers(), chosen = map.chosen;
    if (!chosen || !layers[chosen.row]) return;
    const layer = layers[chosen.row].layer, before = layers.slice(0, chosen.row).reduce((sum, each) => sum + each.count, 0);
    const parts = [];
    if (map.states) parts.push((STATES[map.states[before + chosen.expert]] || STATES[0])[1]);
    const bits = valuesOf("bits")[before + chosen.expert], uses = valuesOf("popularity")[before + chosen.expert];
    if (bits > 0) parts.push(bits.toFixed(2) + " bits per weight");
    if (isNumber(uses)) parts.push("used by " + percent(uses) + " of the tokens of calibration");
    byId("told").textContent = "layer " + layer + ", expert " + chosen.expert + ": " + (parts.join(", ") || "no data");
  }

  function drawLegend() {
    const legend = byId("legend"), name = view();
    legend.replaceChildren();
    if (name === "live") {
      STATES.forEach((state, at) => {
        const sample = make("i");
        sample.style.background = map.colours[at];
        legend.append(make("span", {}, sample, state[1]));
      });
      return;
    }
    const [low, high] = rangeOf(name);
    if (!isNumber(low)) {
      legend.append("this bundle tells none");
      return;
    }
    const bar = make("canvas", { width: 100, height: 1 }), context = bar.getContext("2d");
    for (let x = 0; x < 100; x += 1) {
      context.fillStyle = ramp(x / 99);
      context.fillRect(x, 0, 1, 1);
    }
    const text = value => name === "bits" ? value.toFixed(2) : percent(value);
    legend.append(make("span", {}, text(low), bar, text(high) + (name === "bits" ? " bits" : " of the tokens")));
  }

  function redraw() {
    drawMap(true);
    drawLegend();
    tell();
  }

  // ---- The feed of the server ----

  const feed = { isOpen: false, control: null, wait: 1000 };

  function bytesOf(text) {
    return Uint8Array.from(atob(text), sign => sign.charCodeAt(0));
  }

  /** Show one event of the feed. The first one has the properties, which `readProps` has read. */
  function takeSnapshot(found) {
    if (found.states === undefined) return;
    showFigures(found);
    if (isNumber(found.memory_bytes)) {
      byId("memory").textContent = mib(found.memory_bytes) + (isNumber(found.budget_bytes) ? " of " + mib(found.budget_bytes) : "");
    }
    byId("queue").textContent = !found.running && !found.waiting ? "idle" : found.running + " running, " + found.waiting + " waiting";
    if (typeof found.states === "string") {
      map.states = bytesOf(found.states);
      if (view() === "live" && byId("experts").open) {
        drawMap(false);
        if (map.chosen) tell();
      }
    }
  }

  /** Follow the feed while the page is seen. After an error, wait and try again. */
  async function follow() {
    if (feed.control || document.hidden) return;
    const control = feed.control = new AbortController();
    try {
      const response = await fetch("/v1/moec/events", { headers: headers(), signal: control.signal });
      if (!response.ok) throw new Error("no feed");
      feed.isOpen = true;
      feed.wait = 1000;
      await readEvents(response, data => takeSnapshot(JSON.parse(data)));
    } catch { /* a feed that is gone is tried again */ }
    feed.isOpen = false;
    feed.control = null;
    if (!document.hidden) {
      setTimeout(follow, feed.wait);
      feed.wait = Math.min(30000, 2 * feed.wait);
    }
  }

  async function readProps() {
    try {
      const response = await fetch("/props", { headers: headers() });
      if (!response.ok) throw new Error(await problemOf(response));
      props = await response.json();
      const facts = await fetch("/v1/moec/experts", { headers: headers() });
      if (facts.ok) constants = await facts.json();
    } catch (error) {
      say(error instanceof TypeError ? "the server cannot be reached" : error.message);
      return;
    }
    byId("model").textContent = String(props.model || "");
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

  // ---- Start ----

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
  byId("map").addEventListener("pointermove", event => {
    const box = byId("map").getBoundingClientRect();
    choose(Math.floor((event.clientY - box.top) / map.cellHeight), Math.floor((event.clientX - box.left - LEFT) / map.cellWidth));
  });
  byId("map").addEventListener("keydown", event => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(map.chosen ? map.chosen.row + step[0] : 0, map.chosen ? map.chosen.expert + step[1] : 0);
  });
  for (const radio of document.querySelectorAll("input[name=view]")) radio.addEventListener("change", redraw);
  for (const name of [...SETTINGS, "system"]) byId(name).addEventListener("change", store);
  byId("key").addEventListener("change", () => { readProps(); follow(); });
  for (const name of ["experts", "settings"]) byId(name).addEventListener("toggle", () => {
    redraw();
    byId("log").scrollTop = byId("log").scrollHeight;
  });
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && feed.control) feed.control.abort();
    if (!document.hidden) follow();
  });
  if (window.matchMedia("(max-width: 60rem)").matches) byId("experts").open = false;
  restore();
  drawTurns();
  readProps();
  follow();
  byId("input").focus();
})();
