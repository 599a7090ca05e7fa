// The sections of the page, in order; charts.js draws.
const colour = (i) => COLOURS[i % COLOURS.length];
const percent = (value) => (value === null || value === undefined ? null : 100 * value);

function section(id, title, note, ...children) {
  const shown = children.filter(Boolean);
  if (!shown.length) return;
  page.append(element("section", { id }, element("h2", { textContent: title }),
    ...(note ? [element("p", { className: "note", textContent: note })] : []), ...shown));
  const link = element("a", { href: "#" + id, textContent: title });
  document.querySelector("nav").append(link);
}

function charts(...made) {
  const shown = made.filter(Boolean);
  return shown.length ? element("div", { className: "charts" }, ...shown) : null;
}

function curve(title, key, note = "", options = {}) {
  const series = data.runs.map((run, i) => ({ name: run.name, colour: colour(i), points: run.curves[key] || [] }));
  return lineChart(title, note, series, { x: "step", ...options });
}

function header() {
  const theme = element("button", { id: "theme", textContent: "light / dark" });
  theme.onclick = () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
      (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
  page.append(element("header", {}, element("h1", { textContent: data.runs.map((run) => run.name).join(", ") }),
    element("span", { className: "quiet", textContent: `made ${data.made} by lacuna report` }), theme), element("nav"));
}

function overview() {
  const rows = data.runs.map((run) => [run.name, run.method, run.samples, run.steps, run.scores.val, run.scores.test,
    run.versions.git ? run.versions.git.slice(0, 10) : "", run.path]);
  section("runs", "Runs", "mAP in percent, classes without positives skipped; of the best validation epoch's weights.",
    table([{ name: "run" }, { name: "method" }, { name: "samples", number: true }, { name: "steps", number: true },
      { name: "val mAP", number: true, digits: 2 }, { name: "test mAP", number: true, digits: 2 }, { name: "git" },
      { name: "folder" }], rows, { sort: true }));
  const claims = data.runs.filter((run) => run.reported);
  if (claims.length) {
    section("reported", "Reported by papers", "Of the experiments that these runs are named like; a changed setting is a changed claim.",
      table([{ name: "run" }, { name: "test mAP", number: true, digits: 2 }, { name: "reported" }, { name: "what" }, { name: "config" }],
        claims.map((run) => [run.name, run.scores.test, run.reported.numbers, run.reported.source, run.reported.config]), { sort: true }));
  }
  if (!data.gap) return;
  section("gap", "Gap closed", `Of the distance between ${data.gap.baseline} and ${data.gap.oracle} (full labels), ${data.gap.split} mAP.`,
    table([{ name: "run" }, { name: "method" }, { name: "mAP", number: true, digits: 2 }, { name: "gap closed %", number: true, digits: 1 }],
      data.gap.rows.map((row) => [row.run, row.method, row.score, percent(row.closed)]), { sort: true }));
}

function searches() {
  for (const [number, found] of (data.searches || []).entries()) {
    const several = new Set(found.trials.map((t) => t.method)).size > 1;
    const word = (method, text) => (several ? `${method}: ${text}` : text);
    const mattered = found.mattered.map(([method, key, share]) => [method, key, percent(share)]);
    const clouds = found.settings.map((one) => scatterChart(word(one.method, one.key), "Validation mAP of every trial at its last epoch.",
      one.clouds.map((cloud, i) => ({ ...cloud, colour: colour(i) })), { x: one.axis, y: "val mAP" }));
    section("search" + (number || ""), `Search ${found.name}`,
      `${found.trials.length} trials, best: ${found.best}. The test set took no part.`,
      charts(lineChart("Best trials", "Validation mAP after every evaluation.",
        found.curves.map((one, i) => ({ ...one, colour: colour(i) })), { x: "evaluation", legend: true })),
      mattered.length ? element("h3", { textContent: "What mattered" }) : null,
      mattered.length ? element("p", { className: "note", textContent: "Part of the differences between trials that goes with a setting alone, at the first rung." }) : null,
      mattered.length ? table([{ name: "method" }, { name: "setting" }, { name: "% of the variance", number: true, digits: 1 }], mattered, { sort: true }) : null,
      charts(...clouds),
      table([{ name: "trial" }, { name: "settings" }, { name: "method" }, { name: "status" }, { name: "epochs", number: true },
        { name: "val mAP", number: true, digits: 2 }, { name: "seconds", number: true, digits: 0 }, { name: "reason" }],
        found.trials.map((t) => [t.trial, t.settings, t.method, t.status, t.epochs, t.score, t.seconds, t.reason]),
        { sort: true, search: "search trials" }));
  }
}

function training() {
  section("curves", "Training", "Click a run in a legend to hide it.", charts(
    curve("Loss", "loss"), curve("Validation mAP", "val_map_skip_empty")));
}

// Why a history has few points, and what would give more.
function sparse(run, moments) {
  if (moments >= 4 || moments >= run.epochs) return null;
  return element("p", { className: "note", textContent: `${run.name}: ${moments} ${moments === 1 ? "moment" : "moments"} only. A run keeps its newest ` +
    `${run.keep} checkpoints (train.keep=${run.keep}) and the best one, and what is older is gone. train.keep=${run.epochs} keeps one per epoch.` });
}

function classes() {
  const found = data.classes, several = found.runs.length > 1;
  if (!found.rows.length) return;
  const columns = [{ name: "class" }, { name: "id" }, { name: "positives", number: true }, { name: "annotated %", number: true, digits: 2 },
    ...found.runs.map((name) => ({ name: "AP " + name, number: true, digits: 2 })),
    ...found.runs.slice(1).map((name) => ({ name: `${name} − ${found.runs[0]}`, number: true, digits: 2 }))];
  const lowest = (row, i) => {
    const both = [row.annotated[0], row.annotated[i]].filter((v) => v !== null);
    return both.length ? Math.min(...both) : null;
  };
  const difference = (row, i) => (row.ap[i] === null || row.ap[0] === null ? null : 100 * (row.ap[i] - row.ap[0]));
  const rows = found.rows.map((row) => [row.name, row.id, row.positives, percent(lowest(row, 0)), ...row.ap.map(percent),
    ...row.ap.slice(1).map((_, i) => difference(row, i + 1))]);
  const clouds = found.runs.slice(1).map((name, i) => {
    const usable = found.rows.filter((row) => difference(row, i + 1) !== null && lowest(row, i + 1) !== null);
    return { name, colour: colour(i + 1), names: usable.map((row) => row.name),
      points: usable.map((row) => [100 * lowest(row, i + 1), difference(row, i + 1)]) };
  });
  section("classes", "Classes", `Average precision in percent (${found.split} set). Click a column to sort.`,
    table(columns, rows, { sort: true, search: "search classes" }),
    several ? charts(scatterChart("AP difference and annotation", `Each dot is a class: its AP minus that of ${found.runs[0]}, against the annotated part of its training labels (of the run with fewer).`,
      clouds, { x: "annotated entries, % of samples", y: "AP difference", zero: true, y0: 0, y1: 0 })) : null);
}

// A dark-to-bright order for moments of training.
function moment(i, count) {
  const part = count > 1 ? i / (count - 1) : 1;
  return `hsl(${225 - 195 * part} 70% ${62 - 14 * part}%)`;
}

function distribution(title, note, moments, key) {
  const usable = moments.filter((m) => m[key]);
  const series = usable.map((m, i) => ({ name: "step " + m.step, colour: moment(i, usable.length),
    points: m[key].map((share, bin) => [(bin + 0.5) / m[key].length, 100 * share]) }));
  return lineChart(title, note, series, { x: "probability", x0: 0, x1: 1, y0: 0, legend: true });
}

function beliefs() {
  const believing = data.runs.map((run, i) => ({ run, i })).filter(({ run }) => run.beliefs);
  const recovery = (key) => believing.map(({ run, i }) => ({ name: run.name, colour: colour(i),
    points: run.beliefs.moments.filter((m) => m[key] !== undefined).map((m) => [m.step, m[key]]) }));
  const parts = [charts(
    lineChart("Label recovery on the training set", "mAP of the beliefs against the full labels.", recovery("recovery"), { x: "step", legend: true }),
    lineChart("Recovery of unobserved labels", "The same over entries that training did not see.", recovery("recovery_unobserved"), { x: "step", legend: true }))];
  for (const { run, i } of believing) {
    const b = run.beliefs, known = b.frequency.filter((f) => f.true !== null);
    const most = Math.max(0.01, ...known.flatMap((f) => [f.true, f.estimated]));
    parts.push(element("h3", { textContent: run.name }),
      element("p", { className: "note", textContent: `${b.origin}, ${b.samples} training samples, % of entries per bin` }),
      ...[sparse(run, b.moments.length)].filter(Boolean), charts(
        distribution("Unobserved positives", "True labels that training did not see.", b.moments, "unobserved_positive"),
        distribution("Unobserved negatives", "Absent classes that training did not see as such.", b.moments, "unobserved_negative"),
        distribution("Highest score of an image", "Over all classes.", b.moments, "top1"),
        scatterChart("Class frequency", "Mean belief at the last moment against the true frequency.",
          [{ name: run.name, colour: colour(i), names: known.map((f) => f.name), points: known.map((f) => [f.true, f.estimated]) }],
          { x: "true", y: "estimated", x0: 0, y0: 0, x1: most, y1: most, diagonal: true })));
  }
  section("beliefs", "Beliefs about the training labels", "", ...(believing.length ? parts : []));
}

function strips() {
  const tables = [];
  for (const run of data.runs.filter((r) => r.strips)) {
    const { steps, images } = run.strips, body = element("tbody");
    body.append(element("tr", {}, element("td"), element("td"), ...steps.map((step) => element("td", { textContent: "step " + step }))));
    for (const image of images) image.rows.forEach((row, i) => {
      const picture = element("td", {}, ...(i ? [] : [element("img", { src: image.picture, alt: image.key, title: image.key })]));
      const cells = row.cells.map((cell) => element("td", {}, ...(cell ? [element("img", { src: cell.picture, alt: row.name }),
        element("span", { className: "peak", textContent: cell.peak.toFixed(2) + (cell.start >= 0.005 ? `, start ${Math.round(100 * cell.start)} %` : "") })] : ["–"])));
      body.append(element("tr", {}, picture, element("td", {}, element("b", { textContent: row.name }), element("br"),
        element("span", { className: "quiet", textContent: row.note })), ...cells));
    });
    tables.push(element("h3", { textContent: run.name }), ...[sparse(run, steps.length)].filter(Boolean),
      element("div", { className: "scroll wide" }, element("table", { className: "strips" }, body)));
  }
  section("heatmaps", "Heatmaps over training", "The running mean of what the model saw in some training images, with each map's largest value. Maps of annotated classes start at 1: " +
    "what is left of that start is taken out of the colours and given beside them. Hatched: in no crop yet.", ...tables);
}

function plumbing() {
  section("plumbing", "What the machine did", "", charts(curve("Learning rate", "lr", "", { y0: 0 }),
    curve("Throughput, samples per second", "samples_per_second", "", { y0: 0 }),
    curve("Waiting for data, seconds per step", "data_wait_seconds", "", { y0: 0 }),
    curve("Waiting for state, seconds per step", "state_stall_seconds", "", { y0: 0 }),
    curve("State read, bytes per step", "state_bytes_read", "", { y0: 0 }),
    curve("State written, bytes per step", "state_bytes_written", "", { y0: 0 })));
}

function settings() {
  const several = data.config.runs.length > 1;
  section("config", several ? "What the configs differ in" : "Config", "",
    data.config.rows.length ? table([{ name: "key" }, ...data.config.runs.map((name) => ({ name }))], data.config.rows) :
      element("p", { textContent: "Nothing: the configs are equal." }));
}

function absent() {
  section("absent", "What is not shown, and why", "", data.absent.length ? table([{ name: "run" }, { name: "figure" }, { name: "why" }],
    data.absent.map((a) => [a.run, a.what, a.why])) : null);
}

header();
for (const draw of [headline, overview, searches, training, classes, beliefs, strips, settings, plumbing, absent]) draw();
document.body.dataset.ready = "yes";
