
// The page of a pool that runs: asks for what is new, and follows the present.

const POLL_MILLISECONDS = 1000, FRAME_MILLISECONDS = 33;
const MAX_SPANS = 100000, KEPT_SPANS = 60000;  // of more spans, the oldest are forgotten
const COLUMNS = ["drone", "pid", "host", "state", "task", "item", "client", "for", "memory", "processor", "done", ""];
const token = new URLSearchParams(location.search).get("token");
let cursor = [0, 0];  // how much the page has got
let start = null;  // seconds: time 0 of the chart, by the pool's clock
let ahead = null;  // µs that the time of the chart is ahead of `performance.now()`
let following = true, lastPoll = null, stackDrone = null;
const get = id => document.getElementById(id);

function ask(path, given = {}, method = "GET") {
  return fetch(`${path}?${new URLSearchParams(given)}`, { method, headers: { Authorization: `Bearer ${token}` } });
}
async function poll() {
  const began = performance.now();
  try {
    const answer = await ask("data", { entries: cursor[0], threads: cursor[1], ...(start === null ? {} : { start }) });
    if (!answer.ok) throw new Error(await answer.text());
    take(await answer.json());
    tell("");
    if (stackDrone !== null) await showStack(stackDrone);
  } catch (error) {
    tell(`${error.message}. What is below is old.`);
  }
  // Polling takes at most a fifth of the time, however long an answer takes.
  setTimeout(poll, Math.max(POLL_MILLISECONDS, 4 * (performance.now() - began)));
}
function tell(trouble) {
  get("trouble").textContent = trouble;
  get("trouble").hidden = !trouble;
}
function take(news) {
  if (news.end !== null) {
    start = news.start;
    ahead = Math.max(ahead ?? -Infinity, news.end - 1000 * performance.now());
  }
  cursor = news.cursor;
  if (settled > MAX_SPANS) forget(settled - KEPT_SPANS);
  add(news.part);
  showStatus(news.status);
}
function forget(number) {
  while (count > settled) removeRunning(--count);
  for (const name in spans) spans[name].splice(0, number);
  count = settled -= number;
  data.from = spans.started.reduce((least, each) => Math.min(least, each), Infinity);
  data.arrows = data.arrows.map(pair => pair.map(each => each - number)).filter(([from]) => from >= 0);
  for (const row of rows)
    Object.assign(row, { from: [[]], ends: [-Infinity], busy: 0, until: data.from, before: null, lives: row.lives.filter(([, to]) => to > data.from) });
  const notes = data.notes, used = new Map();
  spans.note = spans.note.map(note => find(used, notes[note], () => {}));
  data.notes = [...used.keys()];
  numbers.note = used;
  placeAll(0);
}

// -- the present ----------------------------------------------------------------------------------

let drawnAt = 0;
function follow(moment) {
  if (ahead !== null && moment - drawnAt >= FRAME_MILLISECONDS) {
    data.length = Math.max(data.length, ahead + 1000 * performance.now());
    if (following) {
      const wide = 1e6 * get("window").value;
      view.from = Math.max(data.from, data.length - wide);
      view.to = Math.max(data.length, view.from + 1e6);
      draw();
    }
    drawnAt = moment;
  }
  requestAnimationFrame(follow);
}
function setFollowing(on) {
  following = on;
  get("live").setAttribute("aria-pressed", on);
}
for (const name of ["wheel", "pointerdown", "keydown", "dblclick"])  // shift and wheel scroll the rows
  canvas.addEventListener(name, event => { if (!event.shiftKey) setFollowing(false); }, { passive: true });
for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", () => setFollowing(false));
get("live").addEventListener("click", () => setFollowing(true));
get("window").addEventListener("change", () => setFollowing(true));
get("keep").addEventListener("click", () => { location.href = `timeline.html?token=${encodeURIComponent(token)}&save`; });

// -- numbers and drones ---------------------------------------------------------------------------

const grouped = number => number.toLocaleString("en");
function showStatus(status) {
  const now = performance.now();
  const rate = lastPoll && now > lastPoll.now ? (status.tasks_done - lastPoll.status.tasks_done) / (now - lastPoll.now) * 1000 : 0;
  get("facts").textContent = [
    `${status.engine} pool`, status.state + (status.reason ? `: ${status.reason}` : ""), `on ${status.host}, pid ${status.pid}`,
    ...(status.native_threads ? [`native libraries: ${status.native_threads} thread${status.native_threads === 1 ? "" : "s"} a drone`] : []),
    ...(status.address ? [`${status.address}, ${status.clients} clients`] : []), `polycephaly ${status.version}`,
  ].join(", ");
  const numbers = [
    ["queued", status.queued], ["waiting", status.waiting], ["in flight", status.in_flight], ["running", status.running],
    ["done", status.tasks_done], ["a second", rate < 10 ? Number(rate.toFixed(1)) : Math.round(rate)], ["failed", status.tasks_failed], ["cancelled", status.tasks_cancelled],
    ...Object.entries(status.resources).map(([name, each]) => [`${name} free`, `${each.free} of ${each.size}`]),
  ].map(([name, value]) => [name, typeof value === "number" ? grouped(value) : value]);
  if (status.shared_memory !== null) numbers.push(["shared memory", bytes(status.shared_memory)]);
  get("numbers").replaceChildren(...numbers.map(([name, value]) => {
    const group = document.createElement("div");
    group.append(element("dt", name), element("dd", value));
    return group;
  }));
  showDrones(status.drones, now);
  showFailures(status.failures);
  lastPoll = { status, now };
}
const shown = new Map();  // rows of the table, by the numbers of drones
function showDrones(drones, now) {
  const earlier = new Map((lastPoll ? lastPoll.status.drones : []).map(drone => [drone.number, drone]));
  const numbers = new Set(drones.map(drone => drone.number));
  for (const [number, row] of shown) if (!numbers.has(number)) { row.remove(); shown.delete(number); }
  for (const drone of drones) {
    let row = shown.get(drone.number);
    if (!row) { row = get("drones").tBodies[0].insertRow(); shown.set(drone.number, row); fillRow(row, drone.name); }
    const was = earlier.get(drone.number), used = was && typeof drone.processor === "number" && typeof was.processor === "number"
      ? Math.round(100 * Math.max(0, drone.processor - was.processor) / (now - lastPoll.now) * 1000) + " %" : "";
    const texts = [
      drone.name, drone.pid ?? "", drone.host, drone.state + waitsAt(drone.waiting), drone.running ?? "", drone.item ?? "", drone.client ?? "",
      drone.running && drone.seconds !== null ? seconds(1e6 * drone.seconds) : "", drone.memory === null ? "" : bytes(drone.memory), used, grouped(drone.tasks_done),
    ];
    texts.forEach((text, index) => { if (row.cells[index].textContent !== String(text)) row.cells[index].textContent = text; });
    row.cells[4].title = drone.running ?? "";
    row.className = drone.state.startsWith("unresponsive") || drone.waiting ? "alarm" : "";
  }
}
function showFailures(failures) {  // the newest first
  get("failed").hidden = !failures.length;
  get("failures").tBodies[0].replaceChildren(...failures.reverse().map(failure => {
    const row = document.createElement("tr"), at = new Date(1000 * failure.at).toLocaleTimeString();
    const task = failure.task + (failure.item === null ? "" : ` (item ${failure.item})`);
    row.append(...[at, failure.drone ?? "", task, failure.error].map(text => element("td", text)));
    return row;
  }));
}
function waitsAt(waiting) {
  if (!waiting) return "";
  return ", waits" + (waiting.file ? ` at ${waiting.file}:${waiting.line}` : "") + (waiting.system_call ? ` in ${waiting.system_call}` : "");
}
function fillRow(row, name) {
  for (const _ of COLUMNS) row.insertCell();
  const acts = [
    ["stack", () => { stackDrone = name; showStack(name); }],
    ...page.read_only ? [] : [
      ["interrupt", () => send("interrupt", name)],
      ["kill", () => { if (confirm(`Kill ${name}? Its running task is lost.`)) send("kill", name); }],
    ],
  ];
  for (const [label, run] of acts) {
    const button = element("button", label);
    button.addEventListener("click", run);
    row.cells[COLUMNS.length - 1].append(button);
  }
}
async function send(path, drone) {
  const answer = await ask(path, { drone }, "POST");
  if (!answer.ok) tell(await answer.text());
}
async function showStack(drone) {
  const text = await (await ask("stack", { drone })).text();
  if (stackDrone !== drone) return;  // closed, or another was asked for, meanwhile
  get("stack").querySelector("pre").textContent = text;
  if (!get("stack").open) get("stack").showModal();
}
get("stack").addEventListener("close", () => { stackDrone = null; });

for (const name of COLUMNS) get("drones").tHead.rows[0].append(element("th", name));
readTheme();
add(page.part);
requestAnimationFrame(follow);
poll();
