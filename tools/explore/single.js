// One image at a time: the picture, the question, labels and beliefs, and a strip of what comes next.
import { address, element, said } from "./sheet.js";
import { ask } from "./talk.js";

const at = (id) => document.getElementById(id);
const AHEAD = 12;

export class Single {
  constructor(about, does) {
    [this.about, this.does, this.samples, this.heatClass] = [about, does, new Map(), null];
  }

  async sample(item) {
    const key = `${item.shard}/${item.row}`;
    if (!this.samples.has(key)) {
      if (this.samples.size > 500) this.samples.clear();
      this.samples.set(key, ask(`api/sample?shard=${item.shard}&row=${item.row}`));
    }
    return this.samples.get(key);
  }

  draw(state, items, index) {
    const item = items[index], image = this.about.kind === "image";
    if (this.item !== item) this.heatClass = item.class;
    this.item = item;
    if (image) {
      const wanted = address(item, 640, state.heat ? this.heatClass : null), picture = at("picture");
      if (picture.getAttribute("src") !== wanted) picture.src = wanted;
      picture.onerror = () => { if (picture.getAttribute("src").includes("class=")) picture.src = address(item, 640); };
      for (const next of items.slice(index + 1, index + 1 + AHEAD)) new Image().src = address(next, 640, state.heat ? next.class : null);
    }
    at("question").textContent = (["missing", "questions"].includes(state.view) ? `Is ${item.name} in it?` : item.name) + (item.score === null ? "" : ` ${item.score.toFixed(3)}`);
    at("decision").textContent = [item.decision ? said(item.decision) : "", ...Object.entries(item.others || {}).map(([name, word]) => `${name}: ${said(word)}`)].filter(Boolean).join("; ");
    at("decision").className = item.decision || "";
    this.strip(items, index, image);
    at("key").textContent = at("labels").textContent = "";
    at("top").replaceChildren();
    this.sample(item).then((sample) => { if (this.item === item) this.facts(item, sample); }).catch((error) => this.does.say(error.message));
  }

  facts(item, sample) {
    at("picture").alt = sample.key;
    at("key").textContent = `${sample.key} (shard ${item.shard}, row ${item.row})`;
    at("labels").textContent = [...sample.positives.map((name) => "+ " + name), ...sample.negatives.slice(0, 20).map((name) => "− " + name)].join(", ") || "none";
    at("top").replaceChildren(...sample.top.map((one) => {
      const line = element("button", { type: "button", className: one.class === this.heatClass ? "on" : "", textContent: `${one.score.toFixed(3)} ${one.name}` });
      line.onclick = () => { this.heatClass = one.class; this.does.heat(true); };
      return element("li", {}, line);
    }));
  }

  strip(items, index, image) {
    const first = Math.max(0, index - 3);
    at("strip").replaceChildren(...items.slice(first, first + 14).map((other) => {
      const small = element("button", { type: "button", tabIndex: -1, className: `${other === items[index] ? "on" : ""} ${other.decision || ""}` },
        ...(image ? [element("img", { src: address(other, 200), alt: "" })] : []), element("span", { textContent: other.name }));
      small.onclick = () => this.does.select(other.place);
      return small;
    }));
  }
}
