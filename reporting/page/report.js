"use strict";
// Draws one value of each expert as a map of layers x experts. The data is in the element `map-data`.
(function () {
  const data = JSON.parse(document.getElementById("map-data").textContent);
  const kind = document.getElementById("map-kind"), sort = document.getElementById("map-sort");
  const canvas = document.getElementById("map"), told = document.getElementById("map-value");
  const bar = document.getElementById("map-scale");
  // Cividis: even in lightness, and safe for the colour-blind.
  const ramp = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
    [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
  let rows = [], cell = { width: 8, height: 8, left: 34 }, chosen = null;

  function colour(share) {
    const at = Math.min(0.9999, Math.max(0, share)) * (ramp.length - 1), low = Math.floor(at), part = at - low;
    return "rgb(" + ramp[low].map((c, i) => Math.round(c + (ramp[low + 1][i] - c) * part)).join(",") + ")";
  }

  function isLeftOut(layer, expert) {
    return (data.leftOut[layer] || []).includes(expert);
  }

  function prepare() {
    const map = data.maps[kind.value];
    rows = [];
    map.values.forEach((values, layer) => {
      if (!values.length) return;
      const order = values.map((_, expert) => expert);
      if (sort.checked) order.sort((a, b) => values[b] - values[a] || a - b);
      rows.push({ layer: layer, order: order, values: values });
    });
    const shown = rows.flatMap(row => row.values.filter((value, e) => !isLeftOut(row.layer, e) && (!map.log || value > 0)));
    const low = shown.reduce((a, b) => Math.min(a, b), Infinity), high = shown.reduce((a, b) => Math.max(a, b), -Infinity);
    map.share = value => {
      if (!(high > low)) return 0.5;
      return map.log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
    };
    bar.style.background = "linear-gradient(90deg," + ramp.map((_, i) => colour(i / (ramp.length - 1))).join(",") + ")";
    document.getElementById("map-low").textContent = low.toPrecision(3);
    document.getElementById("map-high").textContent = high.toPrecision(3) + " " + map.unit;
    bar.title = low.toPrecision(3) + " to " + high.toPrecision(3) + " " + map.unit;
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", "scale from " + bar.title);
    return map;
  }

  function draw() {
    const map = prepare(), scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
    const most = Math.max(...rows.map(row => row.order.length));
    cell.width = (width - cell.left) / most;
    cell.height = Math.max(6, Math.min(26, 560 / rows.length));
    canvas.style.height = Math.ceil(cell.height * rows.length) + "px";
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(cell.height * rows.length * scale);
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    rows.forEach((row, line) => {
      const y = line * cell.height;
      if (cell.height >= 10 || line % 4 === 0) {
        context.fillStyle = style.getPropertyValue("--soft");
        context.fillText(String(row.layer), 2, y + cell.height / 2);
      }
      row.order.forEach((expert, place) => {
        const x = cell.left + place * cell.width, gap = cell.width > 5 ? 1 : 0;
        const isOut = isLeftOut(row.layer, expert);
        context.fillStyle = isOut ? style.getPropertyValue("--card") : colour(map.share(row.values[expert]));
        context.fillRect(x, y, cell.width - gap, cell.height - (cell.height > 7 ? 1 : 0));
        if (isOut) {
          context.fillStyle = style.getPropertyValue("--c1");
          context.fillRect(x + cell.width / 2 - 1.5, y + cell.height / 2 - 1.5, 3, 3);
        }
      });
    });
    if (chosen !== null && rows[chosen.line]) {
      context.strokeStyle = style.getPropertyValue("--ink");
      context.lineWidth = 2;
      context.strokeRect(cell.left + chosen.place * cell.width, chosen.line * cell.height, cell.width - 1, cell.height - 1);
    }
  }

  function tell() {
    const row = chosen && rows[chosen.line];
    if (!row || row.order[chosen.place] === undefined) return;
    const expert = row.order[chosen.place];
    const values = Object.values(data.maps).map(map => {
      const value = (map.values[row.layer] || [])[expert];
      return value === undefined ? "" : map.title.split(":")[0].toLowerCase() + " " + value.toPrecision(4) + " " + map.unit;
    }).filter(text => text);
    const out = isLeftOut(row.layer, expert) ? "left out; " : "";
    told.textContent = "layer " + row.layer + ", expert " + expert + ": " + out + values.join(", ");
  }

  function choose(line, place) {
    if (line < 0 || line >= rows.length || place < 0 || place >= rows[line].order.length) return;
    chosen = { line: line, place: place };
    draw();
    tell();
  }

  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    choose(Math.floor((event.clientY - box.top) / cell.height),
      Math.floor((event.clientX - box.left - cell.left) / cell.width));
  });
  canvas.addEventListener("keydown", event => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen === null ? 0 : chosen.line + step[0], chosen === null ? 0 : chosen.place + step[1]);
  });
  kind.addEventListener("change", () => { draw(); tell(); });
  sort.addEventListener("change", () => { draw(); tell(); });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
