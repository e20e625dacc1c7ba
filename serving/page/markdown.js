// Markdown as elements. What a model writes is untrusted: no text is ever parsed as HTML.
import { button, copy, make } from "./elements.js";

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
export function render(element, text) {
  const blocks = blocksOf(text.split("\n")), known = element.blocks || [];
  let same = 0;
  const sources = blocks.map(block => block.kind + "\n" + block.lines.join("\n"));
  while (same < sources.length && sources[same] === known[same]) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(blockNode(block, 0));
  element.blocks = sources;
}
