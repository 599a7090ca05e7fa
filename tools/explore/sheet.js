// The contact sheet: a tile per entry, buttons on it, the heatmap while it is looked at.
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function address(item, side, cls = null) {
  return `picture?shard=${item.shard}&row=${item.row}&side=${side}` + (cls === null ? "" : `&class=${cls}`);
}

const MARKS = { accept: "✓", reject: "✗", skip: "–" };
export const said = (word) => ({ accept: "accepted", reject: "rejected", skip: "skipped" })[word] || "undecided";

export class Sheet {
  constructor(box, about, does) {
    [this.box, this.about, this.does, this.tiles] = [box, about, does, new Map()];
  }

  tile(item) {
    const figure = element("figure", { className: "tile", tabIndex: -1 }), buttons = element("div", { className: "marks" });
    if (this.about.kind === "image") {
      const image = element("img", { alt: "", loading: "lazy", src: address(item, 200) });
      figure.append(image);
      if (this.about.heatmaps) {
        figure.warm = (on) => { image.src = address(item, 200, on ? item.class : null); };
        image.onerror = () => { if (image.src.includes("class=")) figure.warm(false); };
        figure.onmouseenter = () => figure.warm(true);
        figure.onmouseleave = () => figure.warm(this.heat);
        if (this.heat) figure.warm(true);
      }
      image.onclick = () => this.does.select(item.place);
      image.ondblclick = () => this.does.open(item.place);
    }
    for (const word of ["accept", "reject", "skip"]) {
      const button = element("button", { type: "button", textContent: MARKS[word], title: word, tabIndex: -1, className: word });
      button.setAttribute("aria-label", word);
      button.onclick = () => { this.does.select(item.place); this.does.decide(item, item.decision === word ? "clear" : word); };
      buttons.append(button);
    }
    figure.append(element("figcaption", {}, element("span", { className: "name", textContent: item.name }),
      element("span", { className: "score", textContent: item.score === null ? "" : item.score.toFixed(2) })), buttons);
    figure.onfocus = () => this.does.select(item.place);
    return figure;
  }

  draw(items, current, heat) {
    if (this.heat !== heat) {
      this.heat = heat;
      for (const tile of this.tiles.values()) tile.warm?.(heat);
    }
    if (this.items !== items) { this.box.replaceChildren(); this.tiles.clear(); this.items = items; }
    for (const item of items) {
      let tile = this.tiles.get(item.place);
      if (!tile) {
        tile = this.tile(item);
        this.tiles.set(item.place, tile);
        this.box.append(tile);
      }
      const on = item.place === current;
      tile.className = `tile ${on ? "on" : ""} ${item.decision || ""}`;
      tile.tabIndex = on ? 0 : -1;
      const others = Object.entries(item.others || {}).map(([name, word]) => `${name} ${said(word)}`).join(", ");
      tile.setAttribute("aria-label", `${item.name}, ${item.score === null ? "" : "belief " + item.score.toFixed(2) + ", "}${said(item.decision)}${others ? "; " + others : ""}`);
      for (const button of tile.querySelectorAll(".marks button")) button.setAttribute("aria-pressed", String(button.classList.contains(item.decision || "none")));
    }
  }

  columns() { return Math.max(1, getComputedStyle(this.box).gridTemplateColumns.split(" ").length); }

  row(items, current) {
    const at = items.findIndex((item) => item.place === current), width = this.columns(), first = at - (at % width);
    return items.slice(first, first + width);
  }

  reveal(place) {
    const tile = this.tiles.get(place);
    if (!tile) return;
    tile.scrollIntoView({ block: "nearest" });
    if (this.box.contains(document.activeElement)) tile.focus({ preventScroll: true });
  }
}
