// The map of layers x experts: what each expert does now, its bits, its popularity.
import { byId, isNumber, make, percent } from "./elements.js";
import { server } from "./server.js";

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

const view = () => document.querySelector("input[name=view]:checked").value;
const valuesOf = name => server.constants[name] || [];

/** Return the least and the greatest value of a view, without experts that were left out. */
function rangeOf(name) {
  const all = valuesOf(name).filter(value => isNumber(value) && value > 0);
  return [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), -Infinity)];
}

/** Return how each expert looks now, as one text per expert, in the order of layers. */
function looks() {
  const name = view(), count = (server.props.experts || []).reduce((a, b) => a + b, 0), found = [];
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
  const canvas = byId("map"), width = canvas.clientWidth, counts = server.props.experts || [];
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
  return (server.props.experts || []).map((count, layer) => ({ layer: layer, count: count })).filter(each => each.count > 0);
}

/** Choose an expert. A place outside the map chooses none. */
function choose(row, expert) {
  const layers = expertLayers();
  if (!layers[row] || expert < 0 || expert >= layers[row].count) return;
  map.chosen = { row: row, expert: expert };
  map.drawn = [];
  drawMap(true);
  tell();
}

/** Tell about the chosen expert in words. */
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

/** Take the state of each expert, one byte each, from the feed. */
export function showStates(states) {
  map.states = states;
  if (view() !== "live" || !byId("experts").open) return;
  drawMap(false);
  if (map.chosen) tell();
}

/** Draw everything again: the map, its legend, and the line about the chosen expert. */
export function redraw() {
  drawMap(true);
  drawLegend();
  tell();
}

/** Let pointer and arrow keys choose experts, and draw again when the view or the size changes. */
export function listen() {
  const canvas = byId("map");
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    choose(Math.floor((event.clientY - box.top) / map.cellHeight), Math.floor((event.clientX - box.left - LEFT) / map.cellWidth));
  });
  canvas.addEventListener("keydown", event => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(map.chosen ? map.chosen.row + step[0] : 0, map.chosen ? map.chosen.expert + step[1] : 0);
  });
  for (const radio of document.querySelectorAll("input[name=view]")) radio.addEventListener("change", redraw);
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
