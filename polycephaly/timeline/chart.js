"use strict";
// The chart of a timeline: draws only items in view, and only one of those that share a pixel.
// Times are microseconds.
//
//     add(part) ──> lanes (spans by row and lane, in order of time) ──view: from, to──> canvas
//                                                                    pointer ──spanAt──> tooltip

const page = JSON.parse(document.getElementById("data").textContent);
const data = { from: 0, length: page.length, statuses: page.statuses, names: [], notes: [], arrows: [] };
const canvas = document.getElementById("chart"), frame = document.getElementById("frame");
const tall = document.getElementById("tall"), tip = document.getElementById("tip");
const pen = canvas.getContext("2d");
const spans = { lane: [] };  // columns
for (const name in page.part.spans) spans[name] = [];

const AXIS = 26, DRONE_HEIGHT = 26, THREAD_HEIGHT = 16, LANE_HEIGHT = 11, RIGHT = 52;
const MIN_VIEW_MICROSECONDS = 0.05;  // microseconds that the view may be narrowed to
const MAX_ARROWS = 300;  // of so many all are drawn; of more, those of the span under the pointer
const NORMAL_STATUSES = ["running", "done"].map(name => data.statuses.indexOf(name));

// -- rows and lanes, with their places ------------------------------------------------------------

const rows = [];  // by their numbers
const numbers = { row: new Map(), name: new Map(), note: new Map() };  // those in parts are their own
let count = 0, settled = 0;  // spans; those of them that do not run any more
let total = 0, left = 60, laidOut = 0;
const font = "12px " + getComputedStyle(document.body).fontFamily;
const small = font.replace("12px", "11px");

function add(part) {  // what is new since the part before; see page.py
  while (count > settled) removeRunning(--count);
  const known = {
    row: part.rows.map(([drone, thread]) => find(numbers.row, JSON.stringify([drone, thread]), () => addRow(drone, thread))),
    name: part.names.map(name => find(numbers.name, name, () => addName(name))),
    note: part.notes.map(note => find(numbers.note, note, () => data.notes.push(note))),
  };
  for (const [from, to] of part.arrows) data.arrows.push([settled + from, settled + to]);
  append(part.spans, known);
  settled = count;
  for (const row of rows) { row.waits = null; row.before = null; }
  append(part.running, known);
  for (const [row, from, to] of part.lives) rows[known.row[row]].lives.push([from, to]);
  for (const [row, sent] of part.waits) rows[known.row[row]].waits = sent;
  const lanes = rows.reduce((sum, row) => sum + row.from.length, 0);
  if (lanes !== laidOut) { laidOut = lanes; layOut(); } else redraw();
}
function find(known, key, make) {
  if (!known.has(key)) { known.set(key, known.size); make(); }
  return known.get(key);
}
function addRow(drone, thread) {
  rows.push({ drone, thread, number: rows.length, from: [[]], ends: [-Infinity], lives: [], busy: 0, until: 0, waits: null, before: null });
}
function addName(name) {
  const colour = page.palette[data.names.length % page.palette.length];
  data.names.push({ name, colour });
  addToLegend({ name, colour }, data.names.length - 1);
}
function append(columns, known) {
  const first = count;
  for (const name in columns) for (const value of columns[name]) spans[name].push(name in known ? known[name][value] : value);
  count = spans.row.length;
  placeAll(first);
}
function placeAll(first) {
  const added = Array.from({ length: count - first }, (_, index) => first + index);
  for (const i of added.sort((a, b) => spans.started[a] - spans.started[b])) place(i);
}
function place(i) {  // in the first lane that is free; overlapping spans are in several
  const row = rows[spans.row[i]], started = spans.started[i], finished = spans.finished[i];
  if (i >= settled) row.before ??= { ends: [...row.ends], busy: row.busy, until: row.until };
  let lane = row.ends.findIndex(end => end <= started);
  if (lane < 0) { lane = row.ends.length; row.from.push([]); }
  row.ends[lane] = finished;
  row.from[lane].push(i);
  spans.lane[i] = lane;
  if (finished > row.until) { row.busy += finished - Math.max(started, row.until); row.until = finished; }
}
function removeRunning(i) {
  const row = rows[spans.row[i]], lane = row.from[spans.lane[i]];
  lane.splice(lane.indexOf(i), 1);
  if (row.before) { Object.assign(row, row.before); row.before = null; }
  while (row.ends.length < row.from.length) row.ends.push(-Infinity);
  for (const name in spans) spans[name].length = i;
}
function layOut() {
  const drones = [...new Set(rows.map(row => row.drone))];
  const order = [...rows].sort((a, b) => drones.indexOf(a.drone) - drones.indexOf(b.drone) || !!a.thread - !!b.thread || a.number - b.number);
  total = 0;
  left = 60;
  for (const row of order) {
    row.top = total;
    row.height = row.thread ? THREAD_HEIGHT : Math.max(DRONE_HEIGHT, Math.min(24, row.from.length) * LANE_HEIGHT);
    total += row.height;
    pen.font = "600 " + font;
    left = Math.max(left, pen.measureText(row.thread || row.drone).width + (row.thread ? 26 : 22));
  }
  left = Math.min(left, 260, Math.round(frame.clientWidth * 0.3));
  fit();
}

// -- the view -------------------------------------------------------------------------------------

const view = { from: 0, to: data.length };
let width = 0, height = 0, chosen = -1, hovered = -1, waiting = 0;
const xOf = time => left + (time - view.from) / (view.to - view.from) * (width - left - RIGHT);
const timeOf = x => view.from + (x - left) / (width - left - RIGHT) * (view.to - view.from);

function show(from, to) {
  const long = Math.min(data.length - data.from, Math.max(MIN_VIEW_MICROSECONDS, to - from));
  view.from = Math.max(data.from, Math.min(from, data.length - long));
  view.to = view.from + long;
  redraw();
}
function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
function move(share) {
  const by = share * (view.to - view.from);
  show(view.from + by, view.to + by);
}
function redraw() {
  if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; draw(); });
}
function fit() {
  width = frame.clientWidth;
  tall.style.height = total + AXIS + "px";
  height = Math.min(total + AXIS, Math.round(innerHeight * 0.72));
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  redraw();
}

// -- drawing --------------------------------------------------------------------------------------

let theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "paper", "raised", "alarm"]) theme[name] = style.getPropertyValue("--" + name).trim();
}
function draw() {
  const scroll = frame.scrollTop;
  pen.fillStyle = theme.paper;
  pen.fillRect(0, 0, width, height);
  drawGrid();
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, width, height - AXIS);
  pen.clip();
  for (const row of rows) {
    const y = row.top + AXIS - scroll;
    if (y + row.height < AXIS || y > height) continue;
    drawName(row, y);
    pen.save();
    pen.beginPath();
    pen.rect(left, y, width - left - RIGHT, row.height);
    pen.clip();
    drawLines(row, y);
    row.from.forEach((lane, number) => drawLane(lane, y + 3 + number * (row.height - 5) / row.from.length, (row.height - 5) / row.from.length - (row.from.length > 1)));
    pen.restore();
  }
  drawArrows(scroll);
  pen.restore();
}
function drawArrows(scroll) {
  const middle = i => {
    const row = rows[spans.row[i]];
    return row.top + AXIS - scroll + 3 + (spans.lane[i] + 0.5) * (row.height - 5) / row.from.length;
  };
  pen.save();
  pen.beginPath();
  pen.rect(left, AXIS, width - left - RIGHT, height - AXIS);
  pen.clip();
  pen.strokeStyle = pen.fillStyle = theme.ink;
  for (const [from, to] of data.arrows) {
    const near = from === hovered || to === hovered;
    if (!near && data.arrows.length > MAX_ARROWS) continue;
    const x = xOf(spans.finished[from]), y = middle(from), atX = xOf(spans.started[to]), atY = middle(to);
    if (Math.max(x, atX) < left || Math.min(x, atX) > width) continue;
    const bend = Math.max(12, (atX - x) / 2);
    pen.globalAlpha = near ? 1 : 0.25;
    pen.lineWidth = near ? 1.5 : 1;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.bezierCurveTo(x + bend, y, atX - bend, atY, atX, atY);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(atX, atY);
    pen.lineTo(atX - 5, atY - 3);
    pen.lineTo(atX - 5, atY + 3);
    pen.fill();
  }
  pen.restore();
}
function drawGrid() {
  const rough = (view.to - view.from) / Math.max(2, (width - left) / 130);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough * 0.999);
  pen.font = small;
  pen.textAlign = "center";
  for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) {
    const x = Math.round(xOf(n * step));
    pen.fillStyle = theme.line;
    pen.fillRect(x, AXIS - 4, 1, height);
    pen.fillStyle = theme.soft;
    pen.fillText(tick(n * step, step), x, 16);
  }
}
function drawName(row, y) {
  pen.textAlign = "right";
  if (!row.thread) {
    pen.fillStyle = theme.line;
    pen.fillRect(0, y, width, 1);
    pen.fillStyle = theme.soft;
    pen.font = small;
    pen.fillText(Math.round(100 * row.busy / Math.max(1, data.length - data.from)) + " %", width - 8, y + row.height / 2 + 4);
  }
  pen.fillStyle = row.thread ? theme.soft : theme.ink;
  pen.font = row.thread ? small : "600 " + font;
  pen.fillText(cut(row.thread || row.drone, left - 16), left - 9, y + row.height / 2 + 4);
}
function drawLines(row, y) {
  pen.fillStyle = theme.soft;
  const middle = y + row.height / 2;
  for (const [from, to] of row.lives) pen.fillRect(xOf(from), middle, xOf(to) - xOf(from), 1);
  if (row.waits !== null) {
    const from = xOf(row.waits);
    pen.fillRect(from, middle, width - from, 1);
  }
}
function drawLane(lane, y, high) {
  let drawn = left - 1;
  for (let at = firstIn(lane, view.from); at < lane.length; at++) {
    const i = lane[at];
    if (spans.started[i] > view.to) break;
    const start = Math.max(left - 2, xOf(spans.started[i])), end = Math.min(width, xOf(spans.finished[i]));
    if (end < drawn + 0.5 && i !== hovered) continue;
    drawTransport(i, start, drawn, y + high / 2);
    const x = Math.max(start, drawn), wide = Math.max(1, end - x);
    drawSpan(i, x, y, wide, high);
    drawn = x + wide;
  }
  pen.globalAlpha = 1;
}
function drawTransport(i, start, drawn, middle) {
  const { sent, received, finished } = spans;
  pen.fillStyle = theme.soft;
  pen.globalAlpha = 0.6;
  if (sent[i] !== null && start - xOf(sent[i]) > 1.5) {
    const x = Math.max(drawn, xOf(sent[i]));
    pen.fillRect(x, middle - 1, Math.max(0, start - x), 2);
  }
  if (received[i] !== null) {
    const x = xOf(finished[i]), wide = xOf(received[i]) - x;
    if (wide > 3) pen.fillRect(x, middle - 0.5, wide, 1);
  }
}
function drawSpan(i, x, y, wide, high) {
  const { cpu, started, finished, status, name } = spans;
  const dim = chosen >= 0 && name[i] !== chosen ? 0.15 : 1;
  if (cpu[i] === null) {
    pen.globalAlpha = 1;
    pen.fillStyle = theme.paper;  // over the lines
    pen.fillRect(x, y, wide, high);
    pen.fillStyle = data.names[name[i]].colour;
    pen.globalAlpha = 0.75 * dim;
    pen.fillRect(x, y, wide, high);
  } else {
    const solid = high * Math.min(1, cpu[i] / Math.max(1, finished[i] - started[i]));
    pen.globalAlpha = 1;
    pen.fillStyle = theme.paper;  // over the lines
    pen.fillRect(x, y, wide, high - solid);
    pen.fillStyle = data.names[name[i]].colour;
    pen.globalAlpha = 0.45 * dim;
    pen.fillRect(x, y, wide, high - solid);
    pen.globalAlpha = dim;
    pen.fillRect(x, y + high - solid, wide, solid);
  }
  if (!NORMAL_STATUSES.includes(status[i])) {
    pen.fillStyle = theme.alarm;
    pen.fillRect(x, y, wide, 2);
  }
  if (i === hovered) {
    pen.strokeStyle = theme.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x, y, wide, high);
  }
  if (wide > 46 && high > 9 && dim === 1) {
    pen.fillStyle = cpu[i] === null ? "#ffffff" : theme.ink;
    pen.font = small;
    pen.textAlign = "left";
    pen.fillText(cut(label(i), wide - 10), x + 5, y + high / 2 + 3.5);
  }
}
function firstIn(lane, time) {  // the first that ends after `time`
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.finished[lane[middle]] < time) low = middle + 1; else high = middle;
  }
  return low;
}

// -- words ----------------------------------------------------------------------------------------

function label(i) {
  const note = data.notes[spans.note[i]], name = data.names[spans.name[i]].name;
  return note ? `${name}(${note})` : spans.calls[i] > 1 ? `${name} × ${spans.calls[i].toLocaleString("en")}` : name;
}
function cut(text, wide) {
  if (pen.measureText(text).width <= wide) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(text.slice(0, middle) + "…").width <= wide) low = middle; else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}
function seconds(us) {
  const [value, unit] = us < 1e3 ? [us, "µs"] : us < 1e6 ? [us / 1e3, "ms"] : [us / 1e6, "s"];
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toPrecision(3)} ${unit}`;
}
function tick(time, step) {
  if (time === 0) return "0";
  const [divisor, unit] = view.to < 1e3 ? [1, "µs"] : view.to < 1e6 ? [1e3, "ms"] : [1e6, "s"];
  return (time / divisor).toFixed(Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9))) + " " + unit;
}
function bytes(n) {
  return n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toPrecision(3)} kB` : n < 1e9 ? `${(n / 1e6).toPrecision(3)} MB` : `${(n / 1e9).toPrecision(3)} GB`;
}

// -- the legend -----------------------------------------------------------------------------------

function addToLegend({ name, colour }, index) {
  const button = document.createElement("button"), square = document.createElement("i");
  square.style.background = colour;
  button.append(square, element("b", name));
  button.title = "Show only this function";
  button.addEventListener("click", () => {
    chosen = chosen === index ? -1 : index;
    for (const each of document.querySelectorAll("#legend button")) each.setAttribute("aria-pressed", each === button && chosen === index);
    redraw();
  });
  document.getElementById("legend").append(button);
}

// -- the tooltip ----------------------------------------------------------------------------------

function spanAt(x, y) {
  if (x < left || x > width - RIGHT || y < AXIS) return -1;
  const inRows = y - AXIS + frame.scrollTop;
  const row = rows.find(each => inRows >= each.top && inRows < each.top + each.height);
  if (!row) return -1;
  const number = Math.min(row.from.length - 1, Math.max(0, Math.floor((inRows - row.top - 3) / ((row.height - 5) / row.from.length))));
  const lane = row.from[number], time = timeOf(x), pixel = timeOf(x + 1) - time;
  for (let at = firstIn(lane, time - pixel); at < lane.length && spans.started[lane[at]] <= time + pixel; at++) return lane[at];
  return -1;
}
function showTooltip(i, event) {
  const row = rows[spans.row[i]], lines = [["drone", row.drone]];
  if (row.thread) lines.push(["green thread", row.thread]);
  lines.push(["status", data.statuses[spans.status[i]]], ["ran for", seconds(spans.finished[i] - spans.started[i])]);
  if (spans.cpu[i] !== null) lines.push(["of that on a processor", seconds(spans.cpu[i])]);
  if (spans.item[i] !== null) lines.push([spans.calls[i] > 1 ? "first item" : "item", spans.item[i].toLocaleString("en")]);
  if (spans.calls[i] > 1) lines.push(["calls", spans.calls[i].toLocaleString("en")]);
  for (const moment of ["queued", "sent", "started", "finished", "received"])
    if (spans[moment][i] !== null) lines.push([moment + " at", seconds(spans[moment][i])]);
  if (spans.there[i] || spans.back[i]) lines.push(["there", bytes(spans.there[i])], ["back", bytes(spans.back[i])]);
  const list = document.createElement("dl");
  for (const line of lines) line.forEach((text, index) => list.append(element(index ? "dd" : "dt", text)));
  tip.replaceChildren(element("strong", label(i)), list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height < innerHeight ? event.clientY + 18 : Math.max(4, event.clientY - box.height - 12)) + "px";
}
function element(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

// -- events of the user ---------------------------------------------------------------------------

let drag = null;
canvas.addEventListener("wheel", event => {
  if (event.shiftKey) return;
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / width);
  else zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 400), Math.max(view.from, Math.min(view.to, timeOf(event.offsetX))));
}, { passive: false });
canvas.addEventListener("pointerdown", event => {
  drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, scroll: frame.scrollTop };
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("moving");
});
canvas.addEventListener("pointermove", event => {
  if (drag) {
    const by = (drag.x - event.clientX) / (width - left - RIGHT) * (drag.to - drag.from);
    frame.scrollTop = drag.scroll + drag.y - event.clientY;
    tip.hidden = true;
    show(drag.from + by, drag.to + by);
    return;
  }
  const at = spanAt(event.offsetX, event.offsetY);
  if (at !== hovered) { hovered = at; redraw(); }
  if (at < 0) tip.hidden = true; else showTooltip(at, event);
});
const release = () => { drag = null; canvas.classList.remove("moving"); };
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", () => { hovered = -1; tip.hidden = true; redraw(); });
canvas.addEventListener("dblclick", () => show(data.from, data.length));
const acts = { in: () => zoom(0.5), out: () => zoom(2), all: () => show(data.from, data.length) };
for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", acts[button.dataset.act]);
const keys = { "+": acts.in, "=": acts.in, "-": acts.out, 0: acts.all, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
canvas.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
frame.addEventListener("scroll", redraw);
addEventListener("resize", fit);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); redraw(); });
