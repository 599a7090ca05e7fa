"use strict";
// Everything that comes from data is written with textContent or as a number: names cannot become markup.
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#2f6fde", "#e4572e", "#2a9d5c", "#a44cd3", "#c98a00", "#0aa3b5", "#d6457f", "#7a7f2a"];
const page = document.getElementById("page"), tip = document.getElementById("tip");

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Math.round(value * 1e4) / 1e4);
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power, found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

// A frame with axes; returns what is needed to place points. Series: {name, colour, points: [[x, y], …]}.
const WIDTH = 430, HEIGHT = 230, BOTTOM = 34, RIGHT = 12;
const LETTER = innerWidth < 520 ? 14 : 13, WIDE = 0.62 * LETTER; // of the drawing: it shrinks with the screen, its letters must not
function frame(series, options) {
  const all = series.flatMap((s) => s.points).filter((p) => p[1] !== null && p[0] !== null);
  const span = (values, low, high) => [Math.min(...values, low ?? Infinity), Math.max(...values, high ?? -Infinity)];
  let [x0, x1] = span(all.map((p) => p[0]), options.x0, options.x1), [y0, y1] = span(all.map((p) => p[1]), options.y0, options.y1);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { y0 -= Math.abs(y0) / 10 || 0.5; y1 += Math.abs(y1) / 10 || 0.5; }
  const high = ticks(y0, y1, 4), top = options.y ? 22 : 8;
  // As much room as the longest number needs: an axis is read whole or not at all.
  const left = Math.max(30, 10 + WIDE * Math.max(...high.map((at) => short(at).length)));
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (WIDTH - left - RIGHT);
  const py = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - BOTTOM - top);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const write = (text, x, y, anchor) => {
    const label = svg("text", { x, y, "text-anchor": anchor, "font-size": LETTER });
    label.textContent = text;
    drawing.append(label);
  };
  for (const at of ticks(x0, x1, 5)) {
    const half = (WIDE * short(at).length) / 2;
    write(short(at), Math.min(Math.max(px(at), half), WIDTH - half), HEIGHT - BOTTOM + LETTER + 3, "middle");
  }
  for (const at of high) {
    drawing.append(svg("line", { class: "axis", x1: left, x2: WIDTH - RIGHT, y1: py(at), y2: py(at) }));
    write(short(at), left - 5, py(at) + 4, "end");
  }
  write(options.x, (left + WIDTH - RIGHT) / 2, HEIGHT - 3, "middle");
  if (options.y) write(options.y, 2, LETTER + 1, "start");
  return { drawing, px, py, left };
}

function legend(series, parts) {
  const box = element("div", { className: "legend" });
  series.forEach((one, i) => {
    const entry = element("span", { className: "entry" }, element("span", { className: "swatch" }), one.name);
    entry.firstChild.style.background = one.colour;
    entry.onclick = () => { entry.classList.toggle("off"); parts[i].classList.toggle("hidden"); };
    box.append(entry);
  });
  return box;
}

function card(title, note, ...children) {
  return element("div", { className: "card" }, element("h3", { textContent: title }),
    ...(note ? [element("p", { className: "note", textContent: note })] : []), ...children);
}

function lineChart(title, note, series, options) {
  series = series.filter((s) => s.points.some((p) => p[1] !== null));
  if (!series.length) return null;
  const { drawing, px, py } = frame(series, options), parts = [];
  for (const one of series) {
    const group = svg("g"), points = one.points.filter((p) => p[1] !== null);
    const path = points.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join("");
    group.append(svg("path", { class: "curve", d: path, stroke: one.colour }));
    if (points.length < 25) for (const p of points) group.append(svg("circle", { cx: px(p[0]), cy: py(p[1]), r: 2.4, fill: one.colour }));
    drawing.append(group);
    parts.push(group);
  }
  drawing.onmousemove = (event) => {
    const box = drawing.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * WIDTH;
    const lines = series.map((one) => {
      const near = one.points.reduce((best, p) => (Math.abs(px(p[0]) - at) < Math.abs(px(best[0]) - at) ? p : best));
      return `${one.name}: ${short(near[1])} at ${short(near[0])}`;
    });
    showTip(event, lines.join("\n"));
  };
  drawing.onmouseleave = () => { tip.hidden = true; };
  return card(title, note, drawing, ...(series.length > 1 || options.legend ? [legend(series, parts)] : []));
}

function scatterChart(title, note, series, options) {
  series = series.filter((s) => s.points.length);
  if (!series.length) return null;
  const { drawing, px, py, left } = frame(series, options), parts = [];
  if (options.diagonal) drawing.append(svg("line", { class: "axis", x1: px(0), y1: py(0), x2: px(options.x1), y2: py(options.x1), "stroke-dasharray": "4 4" }));
  if (options.zero) drawing.append(svg("line", { class: "axis", x1: left, x2: WIDTH - RIGHT, y1: py(0), y2: py(0), "stroke-width": 2 }));
  for (const one of series) {
    const group = svg("g");
    one.points.forEach((p, i) => {
      const dot = svg("circle", { cx: px(p[0]), cy: py(p[1]), r: 3, fill: one.colour, "fill-opacity": 0.65 });
      dot.onmousemove = (event) => showTip(event, `${one.names[i]}\n${options.x}: ${short(p[0])}\n${options.y}: ${short(p[1])}`);
      dot.onmouseleave = () => { tip.hidden = true; };
      group.append(dot);
    });
    drawing.append(group);
    parts.push(group);
  }
  return card(title, note, drawing, ...(series.length > 1 ? [legend(series, parts)] : []));
}

// Columns: {name, number?}. Rows: arrays of text or numbers; null is shown as a dash and sorted last.
function table(columns, rows, options = {}) {
  const body = element("tbody"), heads = element("tr"), made = [];
  for (const row of rows) {
    const line = element("tr");
    row.forEach((value, i) => line.append(element("td", { className: columns[i].number ? "number" : "",
      textContent: columns[i].number ? (value === null ? "–" : (columns[i].digits === undefined ? short(value) : value.toFixed(columns[i].digits))) : value })));
    body.append(line);
    made.push({ row, line });
  }
  columns.forEach((column, i) => {
    const head = element("th", { className: (column.number ? "number " : "") + (options.sort ? "sortable" : ""), textContent: column.name });
    if (options.sort) head.onclick = () => {
      const falling = head.getAttribute("aria-sort") !== "descending";
      for (const other of heads.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const order = (a, b) => (column.number ? a - b : String(a).localeCompare(String(b))) * (falling ? -1 : 1);
      made.sort((a, b) => (a.row[i] === null) - (b.row[i] === null) || (a.row[i] === null ? 0 : order(a.row[i], b.row[i])));
      body.append(...made.map((one) => one.line));
    };
    heads.append(head);
  });
  const whole = element("table", {}, element("thead", {}, heads), body);
  if (!options.search) return element("div", { className: "scroll wide" }, whole);
  const field = element("input", { type: "search", placeholder: options.search }), count = element("span", { className: "quiet" });
  field.oninput = () => {
    const wanted = field.value.trim().toLowerCase();
    let shown = 0;
    for (const one of made) {
      const fits = String(one.row[0]).toLowerCase().includes(wanted) || String(one.row[1]).toLowerCase().includes(wanted);
      one.line.classList.toggle("hidden", !fits);
      shown += fits;
    }
    count.textContent = ` ${shown} of ${made.length}`;
  };
  field.oninput();
  return element("div", {}, field, count, element("div", { className: "scroll" }, whole));
}
