"use strict";
// One state, one function that draws it. Names from data are written with textContent only.
const at = (id) => document.getElementById(id);
const PAGE = 60;
const state = { view: "missing", cls: "all", items: [], total: 0, place: 0, heat: false, heatClass: null, sample: null };
let about = null;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

async function ask(path, body) {
  const options = body ? { method: "POST", headers: { "X-Lacuna": "1", "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  const answer = await fetch(path, options), found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function say(text) { at("message").textContent = text; }

// One thing at a time: a key pressed while the next sample is on its way must not decide about one that nobody has seen.
async function guarded(work) {
  if (document.body.dataset.busy === "yes") return;
  document.body.dataset.busy = "yes";
  try { await work(); } catch (error) { say(error.message); }
  document.body.dataset.busy = "no";
}

async function start() {
  about = await ask("api/overview");
  at("run").textContent = about.run;
  at("facts").textContent = `${about.samples.toLocaleString()} samples, labels ${about.labels}; beliefs: ${about.origin}`;
  at("classes").append(row("all", "all classes", ""), ...about.classes.map((c, i) => row(i, c.name, c.annotated)));
  decided(about.counts);
  await load("missing", "all");
  document.body.dataset.ready = "yes";
}

function row(id, name, count) {
  const made = element("div", { className: "class" }, element("span", { textContent: name }), element("span", { className: "quiet", textContent: count }));
  made.dataset.id = id;
  made.onclick = () => guarded(() => load(id === "all" && state.view === "annotated" ? "missing" : state.view, id));
  return made;
}

function decided(counts) { at("decided").textContent = `${counts.accept} accepted, ${counts.reject} rejected`; }

async function load(view, cls) {
  if (view === "annotated" && cls === "all") return say("Choose a class on the left to see its annotated samples.");
  const found = await ask(`api/list?view=${view}&class=${cls}&start=0&count=${PAGE}`);
  Object.assign(state, { view, cls, items: found.items, total: found.total, place: 0 });
  say(found.total ? "" : "Nothing here.");
  await show();
}

async function move(step) {
  const next = state.place + step;
  if (next < 0 || next >= state.total) return;
  if (next >= state.items.length) {
    const more = await ask(`api/list?view=${state.view}&class=${state.cls}&start=${state.items.length}&count=${PAGE}`);
    state.items.push(...more.items);
  }
  state.place = next;
  await show();
}

async function decide(word) {
  const item = state.items[state.place];
  if (!item) return;
  const found = await ask("api/decide", { shard: item.shard, row: item.row, class: item.class, decision: word });
  item.decision = word === "undo" ? null : word;
  decided(found.counts);
  if (word === "undo" || state.place + 1 >= state.total) await show();
  else await move(1);
}

async function show() {
  const item = state.items[state.place];
  state.heatClass = item ? item.class : null;
  state.sample = item ? await ask(`api/sample?shard=${item.shard}&row=${item.row}`) : null;
  draw();
}

function address(item, side, cls) {
  return `picture?shard=${item.shard}&row=${item.row}&side=${side}` + (cls === null ? "" : `&class=${cls}`);
}

function draw() {
  for (const button of document.querySelectorAll("[data-view]")) button.classList.toggle("on", button.dataset.view === state.view);
  for (const one of at("classes").children) one.classList.toggle("on", one.dataset.id === String(state.cls));
  at("title").textContent = state.cls === "all" ? "all classes" : about.classes[state.cls].name;
  at("count").textContent = state.total ? `${state.place + 1} of ${state.total}` : "";
  at("heat").classList.toggle("on", state.heat);
  at("heat").hidden = !about.heatmaps;
  at("current").hidden = !state.sample;
  at("strip").replaceChildren();
  if (!state.sample) return;
  const item = state.items[state.place], sample = state.sample;
  const overlay = state.heat && sample.maps.includes(state.heatClass);
  if (about.kind === "image") at("picture").src = address(item, 640, overlay ? state.heatClass : null);
  at("picture").alt = sample.key;
  at("key").textContent = `${sample.key} (shard ${item.shard}, row ${item.row})`;
  const score = item.score === null ? "" : ` ${item.score.toFixed(3)}`;
  at("question").textContent = (["missing", "questions"].includes(state.view) ? `Is this ${item.name}?` : item.name) + score;
  at("decision").textContent = item.decision ? item.decision + "ed" : "";
  at("decision").className = item.decision || "";
  at("labels").textContent = [...sample.positives.map((name) => "+ " + name), ...sample.negatives.slice(0, 20).map((name) => "− " + name)].join(", ") || "none";
  at("top").replaceChildren(...sample.top.map((one) => {
    const line = element("li", { className: one.class === state.heatClass ? "on" : "" }, element("b", { textContent: one.score.toFixed(3) }), one.name);
    line.onclick = () => { state.heatClass = one.class; state.heat = true; draw(); };
    return line;
  }));
  const first = Math.max(0, state.place - 3);
  at("strip").append(...state.items.slice(first, first + 14).map((other, i) => {
    const small = element("figure", { className: `${first + i === state.place ? "on" : ""} ${other.decision || ""}` },
      ...(about.kind === "image" ? [element("img", { src: address(other, 84, null), alt: "" })] : []), element("figcaption", { textContent: other.name }));
    small.onclick = () => guarded(() => move(first + i - state.place));
    return small;
  }));
}

const KEYS = { a: () => decide("accept"), r: () => decide("reject"), u: () => decide("undo"), j: () => move(1), k: () => move(-1),
  ArrowRight: () => move(1), ArrowLeft: () => move(-1), h: () => { state.heat = !state.heat; draw(); } };
document.onkeydown = (event) => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  guarded(KEYS[event.key]);
};
for (const [id, key] of Object.entries({ accept: "a", reject: "r", undo: "u", previous: "k", next: "j", heat: "h" })) at(id).onclick = () => guarded(KEYS[key]);
for (const button of document.querySelectorAll("[data-view]")) button.onclick = () => guarded(() => load(button.dataset.view, state.cls));
for (const button of document.querySelectorAll("[data-export]")) button.onclick = () => guarded(async () => {
  const found = await ask("api/export", { kind: button.dataset.export, name: at("sidecar").value.trim() });
  say(`${found.entries} decisions written: ${found.written}${found.use ? "; train with " + found.use : ""}`);
});
at("search").oninput = () => {
  const wanted = at("search").value.trim().toLowerCase();
  for (const one of at("classes").children) one.classList.toggle("hidden", !one.textContent.toLowerCase().includes(wanted));
};
guarded(start);
