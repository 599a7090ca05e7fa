// Where the page is: view, class, sheet or image, place in the list, heatmap. It lives in the address, so that reloading,
// the back button and a copied link lead to the same place.
const START = { view: "missing", cls: "all", mode: "sheet", place: 0, heat: false };

export function read() {
  const given = new URLSearchParams(location.hash.slice(1)), number = (name) => Math.max(0, Number.parseInt(given.get(name) ?? "0", 10) || 0);
  const cls = given.get("class");
  return { ...START, view: given.get("view") || START.view, cls: cls === null || cls === "all" ? "all" : number("class"),
    mode: given.get("mode") === "one" ? "one" : "sheet", place: number("at"), heat: given.get("heat") === "1" };
}

export function write(state) {
  const said = new URLSearchParams({ view: state.view, class: String(state.cls), mode: state.mode, at: String(state.place) });
  if (state.heat) said.set("heat", "1");
  if (location.hash.slice(1) !== said.toString()) history.replaceState(null, "", "#" + said);
}
