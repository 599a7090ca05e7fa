// The first screen. charts.js makes elements, page.js the sections below.
const points = (value) => value.toFixed(1);

function scoreCard(head) {
  const facts = head.trained.map((line) => element("li", { textContent: line }));
  const number = head.score === null ? [] : [element("p", { className: "number" }, element("b", { textContent: points(head.score) }),
    element("span", { textContent: ` mAP on the ${head.split === "test" ? "test" : "validation"} set` }))];
  return element("div", { className: "card score" }, element("h3", { textContent: `${head.run} (${head.method})` }), ...number,
    ...head.said.map((text) => element("p", { textContent: text })), element("ul", {}, ...facts));
}

function gapBar(row, gap) {
  const closed = row.closed === null ? null : Math.max(0, Math.min(1, row.closed));
  const bar = element("div", { className: "bar", role: "img", ariaLabel: `${row.run}: ${row.closed === null ? "unknown" : points(100 * row.closed) + " % of the gap closed"}` },
    element("div", { className: "fill" }));
  bar.firstChild.style.width = `${100 * (closed || 0)}%`;
  const says = row.closed === null ? "no number" : `${points(100 * row.closed)} % of the gap closed`;
  return element("div", { className: "gapline" }, element("div", { className: "ends" }, element("b", { textContent: `${row.run} ${row.score === null ? "–" : points(row.score)}` }),
    element("span", { textContent: says })), bar);
}

function gapCard(head) {
  const gap = head.gap;
  if (!gap) return null;
  const end = (row, what) => element("span", { textContent: `${row.run} (${what}) ${row.score === null ? "–" : points(row.score)}` });
  const distance = gap.low.score === null || gap.high.score === null ? null : gap.high.score - gap.low.score;
  const lines = gap.rows.length ? gap.rows.map((row) => gapBar(row, gap)) : [element("p", { textContent: distance === null ? "" :
    `Full labels are worth ${points(distance)} points more.` })];
  return element("div", { className: "card gap" }, element("h3", { textContent: "Of the gap to full labels" }), ...lines,
    element("div", { className: "ends quiet" }, end(gap.low, "nothing closed"), end(gap.high, "all labels")));
}

function pictureCards(head) {
  if (!head.pictures.length) return null;
  const mark = { right: "✓ right", wrong: "✗ wrong", "not checked": "not checked" };
  const cards = head.pictures.map((one) => element("figure", { className: "finding " + one.verdict.split(" ")[0] },
    element("div", { className: "pair" }, element("img", { src: one.picture, alt: one.key }),
      ...(one.heat ? [element("img", { src: one.heat, alt: `where ${one.name} was seen` })] : [])),
    element("figcaption", {}, element("b", { textContent: `${one.name} ${one.belief.toFixed(2)}` }), element("span", { className: "verdict", textContent: " " + mark[one.verdict] }),
      element("br"), element("span", { className: "quiet", textContent: one.annotated.length ? "annotated: " + one.annotated.join(", ") : "nothing annotated" }))));
  return element("div", { className: "findings" }, element("h3", { textContent: "Labels that nobody gave, found by the model" }), element("div", { className: "pictures" }, ...cards));
}

function classList(title, rows, compared) {
  if (!rows.length) return null;
  const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + points(Math.abs(100 * value));
  return element("div", { className: "card" }, element("h3", { textContent: title }), table([{ name: "class" }, { name: "AP", number: true, digits: 1 },
    ...(compared ? [{ name: "change" }] : [])], rows.map((c) => [c.name, 100 * c.ap, ...(compared ? [signed(c.change)] : [])])));
}

function headline() {
  const head = data.headline, classes = head.classes, compared = classes.against !== null;
  const grid = (name, ...parts) => {
    const shown = parts.filter(Boolean);
    return shown.length ? element("div", { className: name }, ...shown) : null;
  };
  const lists = grid("lists", classList(compared ? `Gained most against ${classes.against}` : "Best classes", classes.up, compared),
    classList(compared ? `Lost most against ${classes.against}` : "Worst classes", classes.down, compared));
  page.append(element("section", { id: "headline" }, ...[grid("heads", scoreCard(head), gapCard(head)),
    grid("shows", pictureCards(head), lists)].filter(Boolean)));
}
