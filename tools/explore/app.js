// One state, one function that draws it; keys and buttons change the state at once, and decisions go out in a queue.
// Names from data are written with textContent only.
import * as place from "./place.js";
import * as talk from "./talk.js";
import { Sheet, element } from "./sheet.js";
import { Single } from "./single.js";

// 20 keys a second for 5 seconds: so far ahead the list is fetched.
const at = (id) => document.getElementById(id), PAGE = 120, AHEAD = 100;
const state = { ...place.read(), items: [], total: 0, next: 0, decided: null, counts: null, recent: null };
let about = null, sheet = null, single = null, loading = null, waiting = false;

const say = (text) => { at("message").textContent = text; };
const index = () => Math.max(0, state.items.findIndex((item) => item.place >= state.place));
const current = () => state.items[index()];

async function start() {
  about = await talk.ask(`api/overview?${new URLSearchParams({ who: talk.who() })}`);
  at("run").textContent = about.run;
  at("facts").textContent = `${about.samples.toLocaleString()} samples, labels ${about.labels}; beliefs: ${about.origin}`;
  at("classes").append(row("all", "all classes", ""), ...about.classes.map((c, i) => row(i, c.name, c.annotated)));
  at("who").value = talk.who();
  at("heat").hidden = !about.heatmaps;
  [state.counts, state.recent] = [about.counts, about.recent];
  const does = { select, decide, say, open: (to) => { select(to); mode("one"); }, heat: (on) => { state.heat = on; draw(); } };
  [sheet, single] = [new Sheet(at("sheet"), about, does), new Single(about, does)];
  talk.listen(answered, (error) => say(error.refused ? error.message : `Not saved yet (${error.message}); trying again.`));
  await load(state.view, state.cls, state.place);
  document.body.dataset.ready = "yes";
}

function row(id, name, count) {
  const made = element("button", { type: "button", className: "class" }, element("span", { textContent: name }), element("span", { className: "quiet", textContent: count }));
  made.dataset.id = id;
  made.onclick = () => { fold(true); return load(id === "all" && state.view === "annotated" ? "missing" : state.view, id, 0); };
  return made;
}

// The list from some entries before the place on, so that one can go back after a reload.
async function load(view, cls, to) {
  if (view === "annotated" && cls === "all") return say("Choose a class to see its annotated samples.");
  try {
    const found = await talk.list(view, cls, Math.max(0, to - PAGE / 2), PAGE);
    Object.assign(state, { view, cls, items: found.items, total: found.total, next: found.next, decided: found.decided, counts: found.counts, place: to });
    if (state.items.length) state.place = (current() && current().place >= to ? current() : state.items.at(-1)).place;
    say(found.items.length ? "" : found.total ? "Others are at work on what is left here." : view === "questions" ? "No questions yet: lacuna select RUN chooses them." : "Nothing here.");
    document.querySelector(`[data-view="${CSS.escape(view)}"]`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  } catch (error) { say(error.message); }
  draw();
}

function more() {
  if (state.next >= state.total || loading) return loading;
  const { view, cls } = state;
  loading = talk.list(view, cls, state.next, PAGE).then((found) => {
    if (view !== state.view || cls !== state.cls) return;
    state.items.push(...found.items);
    [state.next, state.total] = [found.items.length ? found.next : found.total, found.total];
  }).catch((error) => say(error.message)).finally(() => { loading = null; draw(); });
  return loading;
}

function select(to) { state.place = to; draw(); }

function move(step) {
  const next = state.items[index() + step];
  if (next) select(next.place);
  else if (step > 0 && more()) {
    waiting = true;
    loading.then(() => { waiting = false; if (state.items[index() + 1]) select(state.items[index() + 1].place); });
  }
}

function decide(item, word) {
  if (!item) return;
  if (about.shared && !talk.who()) { fold(false); at("who").focus(); return say("Several people may be here: give your name first."); }
  const was = item.decision;
  item.decision = word === "clear" ? null : word;
  if (state.decided !== null && ["accept", "reject"].includes(word) && !["accept", "reject"].includes(was)) state.decided += 1;
  talk.send({ decision: word, shard: item.shard, row: item.row, class: item.class, view: state.view, list_class: state.cls, place: item.place, settles: state.view === "conflicts" });
}

function vote(word) {
  if (waiting) return say("The list is on its way.");
  decide(current(), word);
  move(1);
  draw();
}

function acceptRow() {
  const row = state.mode === "sheet" ? sheet.row(state.items, current()?.place) : [current()];
  for (const item of row) if (item && !item.decision) decide(item, "accept");
  const after = state.items[state.items.indexOf(row.at(-1)) + 1];
  if (after) select(after.place); else draw();
}

// Whole images are asked class by class: what was not accepted is not there.
function rejectRest() {
  const here = current(), same = (item) => item.shard === here.shard && item.row === here.row;
  if (!here) return;
  for (const item of state.items) if (same(item) && !item.decision) decide(item, "reject");
  const after = state.items.slice(index()).find((item) => !same(item));
  if (after) select(after.place); else draw();
}

async function answered(found) {
  [state.counts, state.recent] = [found.counts, found.recent];
  const back = found.moved.at(-1);
  if (back) {
    const cls = back.list_class === null ? "all" : back.list_class, view = back.view || state.view;
    const here = (item) => item.shard === back.shard && item.row === back.row && item.class === back.class;
    if (view !== state.view || cls !== state.cls || !state.items.some(here)) await load(view, cls, back.place);
    for (const one of found.moved) for (const item of state.items) if (item.shard === one.shard && item.row === one.row && item.class === one.class) item.decision = one.decision;
    const item = state.items.find(here);
    if (item) state.place = item.place;
  }
  draw();
}

function mode(name) { state.mode = name; draw(); }
function fold(closed) {
  document.body.classList.toggle("open", !closed);
  at("menu").setAttribute("aria-expanded", String(!closed));
  at("menu").textContent = closed ? "☰ classes" : "✕ close";
}

function progress() {
  const parts = [], { counts, recent } = state;
  if (state.decided !== null && state.total) parts.push(`${state.decided} of ${state.total} decided here`);
  if (recent?.answers) parts.push(`in your last ${recent.answers} ${recent.answers === 1 ? "answer" : "answers"} you agreed with the model ${recent.agreed} ${recent.agreed === 1 ? "time" : "times"} (${Math.round((100 * recent.agreed) / recent.answers)} %)`);
  at("progress").textContent = parts.join("; ");
  at("decided").textContent = counts ? `${counts.accept} accepted, ${counts.reject} rejected${counts.conflicts ? `, ${counts.conflicts} in conflict` : ""}` : "";
}

function draw() {
  for (const button of document.querySelectorAll("[data-view]")) button.setAttribute("aria-pressed", String(button.dataset.view === state.view));
  for (const one of at("classes").children) one.setAttribute("aria-pressed", String(one.dataset.id === String(state.cls)));
  const one = state.mode === "one", item = current();
  at("mode").textContent = one ? "contact sheet" : "one image";
  at("title").textContent = state.cls === "all" ? "all classes" : about.classes[state.cls]?.name ?? "";
  at("count").textContent = item ? `${item.place + 1} of ${state.total}` : "";
  at("heat").setAttribute("aria-pressed", String(state.heat));
  at("sheet").hidden = one || !item;
  at("current").hidden = at("strip").hidden = !one || !item;
  at("row").hidden = one || state.view === "questions";
  at("rest").hidden = state.view !== "questions";
  progress();
  if (item) {
    if (one) single.draw(state, state.items, index());
    else { sheet.draw(state.items, item.place, state.heat); sheet.reveal(item.place); }
    place.write(state);
    if (index() + AHEAD > state.items.length) more();
  }
}

const KEYS = {
  a: () => vote("accept"), r: () => vote("reject"), s: () => vote("skip"), A: acceptRow, N: rejectRest, u: () => talk.send({ decision: "undo" }), y: () => talk.send({ decision: "redo" }),
  j: () => move(1), k: () => move(-1), ArrowRight: () => move(1), ArrowLeft: () => move(-1),
  ArrowDown: () => move(state.mode === "sheet" ? Math.min(sheet.columns(), state.items.length - 1 - index()) : 1), ArrowUp: () => move(state.mode === "sheet" ? -Math.min(sheet.columns(), index()) : -1),
  h: () => { state.heat = !state.heat; draw(); }, Enter: () => mode(state.mode === "one" ? "sheet" : "one"), "?": () => at("help").showModal(),
};
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "TEXTAREA", "SELECT"].includes(event.target.tagName), button = event.target.tagName === "BUTTON" && ["Enter", " "].includes(event.key);
  if (typing || button || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key] || at("help").open || !about) return;
  event.preventDefault();
  // A key that is held down moves on; it decides nothing more than once.
  if (!event.repeat || !["a", "r", "s", "A", "N", "Enter", "h"].includes(event.key)) KEYS[event.key]();
});
for (const [id, key] of Object.entries({ accept: "a", reject: "r", skip: "s", undo: "u", redo: "y", row: "A", rest: "N", previous: "k", next: "j", heat: "h", keys: "?", mode: "Enter" })) at(id).onclick = () => KEYS[key]();
for (const button of document.querySelectorAll("[data-view]")) button.onclick = () => load(button.dataset.view, state.cls, 0);
for (const button of document.querySelectorAll("[data-export]")) button.onclick = async () => {
  try {
    const found = await talk.ask("api/export", { kind: button.dataset.export, name: at("sidecar").value.trim() });
    say(`${found.entries} decisions written: ${found.written}${found.use ? "; train with " + found.use : ""}`);
  } catch (error) { say(error.message); }
};
at("search").oninput = () => {
  const wanted = at("search").value.trim().toLowerCase();
  for (const one of at("classes").children) one.hidden = !one.textContent.toLowerCase().includes(wanted);
};
at("who").onchange = () => { talk.callMe(at("who").value.trim().slice(0, 40)); load(state.view, state.cls, state.place); };
at("menu").onclick = () => fold(document.body.classList.contains("open"));
addEventListener("hashchange", () => {
  const wanted = place.read();
  if (["view", "cls", "mode", "place", "heat"].every((name) => wanted[name] === state[name])) return;
  [state.mode, state.heat] = [wanted.mode, wanted.heat];
  load(wanted.view, wanted.cls, wanted.place);
});
start().catch((error) => say(error.message));
