"""Proves in a real browser that explore's page decides what was pressed, keeps its place, and fits a phone."""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers.browser import Browser

READY = "document.body.dataset.ready === 'yes'"
TEXT = "document.getElementById('{}').textContent"
SENT = "sessionStorage.getItem('lacuna-unsent') === '[]'"


@pytest.fixture
def page(served, browser) -> Browser:
    """Opened by the address that the command prints; nobody's name, nothing unsent."""
    browser.resize(1280, 900)
    browser.open(served.gate.address, READY)
    browser.evaluate("localStorage.clear(); sessionStorage.clear()")
    return browser


def entries(served, view: str, cls: int | None, count: int) -> list[tuple[int, int, int]]:
    return [(i["shard"], i["row"], i["class"]) for i in served.desk.page(view, cls, 0, count)["items"]]


def reload(page: Browser) -> None:
    page.evaluate("delete document.body.dataset.ready; location.reload()")
    page.wait_for(READY)


def test_twenty_keys_a_second(served, page):
    """200 key presses in one go: every one counts, for the entry that was current when it came."""
    expected = entries(served, "missing", None, 200)
    words = {"a": "accept", "r": "reject", "s": "skip"}
    keys = ["arsra"[i % 5] for i in range(200)]
    for at, key in enumerate(keys):
        if at % 40 == 0:  # the list has been fetched so far: nobody decides about what is not there
            page.wait_for(f"document.querySelectorAll('.tile').length >= {at + 41}")
        page.press(key)
    page.wait_for(SENT)
    assert {e: served.desk.decisions.votes[e][""] for e in expected} == {
        entry: words[key] for entry, key in zip(expected, keys, strict=True)}
    assert len(served.desk.decisions.votes) == 200
    assert page.errors == []


def test_sheet_keys_rows_and_clicks(served, page):
    first = entries(served, "missing", None, 40)
    columns = page.evaluate("getComputedStyle(document.getElementById('sheet')).gridTemplateColumns.split(' ').length")
    assert columns >= 5
    page.press("r")
    page.press("A")
    page.wait_for(SENT)
    assert served.desk.decisions.made == {first[0]: "reject", **dict.fromkeys(first[1:columns], "accept")}
    assert page.evaluate(TEXT.format("count")).startswith(f"{columns + 1} of")
    page.press("ArrowDown")
    assert page.evaluate(TEXT.format("count")).startswith(f"{2 * columns + 1} of")
    page.press("ArrowUp")
    click = "document.querySelectorAll('.tile')[{}].querySelector('.{}').click()"
    page.evaluate(click.format(columns + 2, "reject"))
    page.evaluate(click.format(0, "reject"))  # a second time: taken back
    page.wait_for(SENT)
    assert served.desk.decisions.made == {**dict.fromkeys(first[1:columns], "accept"), first[columns + 2]: "reject"}
    assert "0 of" not in page.evaluate(TEXT.format("progress"))
    page.evaluate("document.querySelectorAll('.tile')[3].onmouseenter()")
    page.wait_for("document.querySelectorAll('.tile img')[3].src.includes('class=')")
    page.wait_for("document.querySelectorAll('.tile img')[3].naturalWidth >= 200")
    assert page.errors == []


def test_the_rest_of_an_image(served, page):
    """Whole images as questions: accept what is there, N rejects what is left of the image and goes to the next."""
    home, labels = os.path.dirname(served.desk.decisions.path), served.desk.source.sidecar.name
    asked = [{"shard": 0, "row": row, "class": cls, "score": 0.5} for row in (3, 5) for cls in (1, 4, 7)]
    with open(os.path.join(home, f"questions-{labels}.json"), "w", encoding="utf-8") as f:
        json.dump({"questions": asked}, f)
    page.evaluate("document.querySelector('[data-view=questions]').click()")
    page.wait_for(TEXT.format("count") + " === '1 of 6'")
    page.press("j")
    page.press("a")
    page.press("N")
    page.wait_for(TEXT.format("count") + " === '4 of 6'")
    page.wait_for(SENT)
    assert served.desk.decisions.made == {(0, 3, 1): "reject", (0, 3, 4): "accept", (0, 3, 7): "reject"}
    page.press("u")
    page.wait_for(SENT)
    assert len(served.desk.decisions.made) == 2
    os.remove(os.path.join(home, f"questions-{labels}.json"))
    assert page.errors == []


def test_undo_and_redo_wherever_it_was(served, page):
    """A vote in one class, undone from another one's annotated samples: the page goes back to it."""
    page.evaluate("document.querySelector('.class[data-id=\"7\"]').click()")
    page.wait_for(TEXT.format("title") + " === '7'")
    seven = entries(served, "missing", 7, 3)
    page.press("a")
    page.press("r")
    page.wait_for(SENT)
    page.evaluate("document.querySelector('.class[data-id=\"2\"]').click()")
    page.wait_for(TEXT.format("title") + " === '2'")
    page.evaluate("document.querySelector('[data-view=annotated]').click()")
    page.wait_for("location.hash.includes('view=annotated')")
    page.press("u")
    page.wait_for(TEXT.format("title") + " === '7'")
    page.wait_for(TEXT.format("count") + ".startsWith('2 of')")
    assert served.desk.decisions.made == {seven[0]: "accept"}
    page.press("u")
    page.wait_for(TEXT.format("count") + ".startsWith('1 of')")
    assert served.desk.decisions.made == {}
    for _ in range(2):
        page.press("y")
    page.wait_for(SENT)
    page.wait_for("document.querySelectorAll('.tile')[1].classList.contains('reject')")
    assert served.desk.decisions.made == {seven[0]: "accept", seven[1]: "reject"}
    assert page.errors == []


def test_reload_loses_nothing(served, page):
    """View, class, place, mode and heatmap are in the address; what was not sent is sent afterwards, once."""
    page.evaluate("document.querySelector('.class[data-id=\"4\"]').click()")
    page.wait_for(TEXT.format("title") + " === '4'")
    for _ in range(12):
        page.press("j")
    page.evaluate("document.getElementById('mode').click()")
    page.press("h")
    page.wait_for("document.getElementById('picture').src.includes('class=')")
    question = page.evaluate(TEXT.format("question"))
    reload(page)
    assert page.evaluate(TEXT.format("title")) == "4"
    assert page.evaluate(TEXT.format("count")).startswith("13 of")
    assert page.evaluate(TEXT.format("question")) == question
    page.wait_for("document.getElementById('picture').naturalWidth >= 256")
    entry = entries(served, "missing", 4, 13)[12]
    body = f"{{decision: 'accept', shard: {entry[0]}, row: {entry[1]}, class: {entry[2]}, id: 'once'}}"
    page.evaluate(f"sessionStorage.setItem('lacuna-unsent', JSON.stringify([{body}, {body}]))")
    reload(page)
    page.wait_for(SENT)
    assert served.desk.decisions.made == {entry: "accept"}
    assert len(open(served.desk.decisions.path).readlines()) == 1  # noqa: SIM115
    page.press("k")
    assert page.evaluate(TEXT.format("count")).startswith("12 of"), "one can go back after a reload"
    assert page.errors == []


def test_two_people(served, page):
    """Names part the work; a conflict is listed with who said what, and one vote settles it."""
    name = "(() => {{ const w = document.getElementById('who'); w.value = '{}'; w.onchange(); }})()"
    page.evaluate(name.format("ann"))
    page.wait_for("localStorage.getItem('lacuna-name') === 'ann'")
    first = entries(served, "missing", None, 1)[0]
    page.press("a")
    page.wait_for(SENT)
    assert served.desk.decisions.votes == {first: {"ann": "accept"}}
    shard, row, cls = first
    served.decide("<b>bob</b>", {"shard": shard, "row": row, "class": cls, "decision": "reject", "view": "second"})
    page.evaluate("document.querySelector('[data-view=conflicts]').click()")
    page.wait_for(TEXT.format("count") + " === '1 of 1'")
    page.evaluate("document.getElementById('mode').click()")
    assert page.evaluate(TEXT.format("decision")) == "accepted; <b>bob</b>: rejected"
    assert page.evaluate("document.querySelector('#decision b')") is None, "names are text"
    page.press("r")
    page.wait_for(SENT)
    assert served.desk.decisions.made == {first: "reject"}
    page.evaluate("localStorage.clear()")
    assert page.errors == []


def test_without_a_mouse(served, page):
    """Tab reaches every control in order, the focus is seen, and everything has a name that can be read out."""
    page.evaluate("document.body.focus()")
    seen = []
    for _ in range(45):
        page.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className || "
                                  "document.activeElement.dataset.view || document.activeElement.dataset.export "
                                  "|| ''"))
    assert {"mode", "heat", "keys", "who", "search", "sidecar", "accept", "reject", "skip", "row", "undo", "redo",
            "next"} <= set(seen)
    assert any("tile" in one for one in seen), "one stop for the whole sheet; arrows move inside"
    assert sum("tile" in one for one in seen) <= 2
    names = page.evaluate("[...document.querySelectorAll('button')].filter((b) => !(b.getAttribute('aria-label') || "
                          "b.textContent.trim())).length")
    assert names == 0
    page.evaluate("document.activeElement.blur()")
    page.press("?")
    page.wait_for("document.getElementById('help').open")
    page.evaluate("document.querySelector('#help button').click()")
    page.wait_for("!document.getElementById('help').open")


CONTRAST = """(() => {
  const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = (rgb) => { const [r, g, b] = rgb.match(/[0-9.]+/g).map(Number); return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.startsWith('rgba(0, 0, 0, 0')) return c; } return 'rgb(255,255,255)'; };
  return [...document.querySelectorAll('button, p, span, h1, h2, h3, label')].filter((e) => e.offsetParent && e.textContent.trim()).map((e) => {
    const a = light(getComputedStyle(e).color), b = light(ground(e));
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.id || e.className || e.textContent];
  }).filter(([ratio]) => ratio < 4.5); })()"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page, scheme):
    page.prefer(scheme)
    assert page.evaluate(CONTRAST) == []


def test_on_a_phone(served, page):
    """Nothing is wider than the screen, the classes fold away, buttons are large and at the thumb."""
    page.resize(390, 844)
    reload(page)
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == 390
    assert page.evaluate("getComputedStyle(document.getElementById('side')).display") == "none"
    for name in ("accept", "reject", "skip", "undo"):
        box = page.evaluate(f"(() => {{ const b = document.getElementById('{name}').getBoundingClientRect(); "
                            "return [b.top, b.bottom, b.width, b.height]; })()")
        assert 844 / 2 < box[0] < box[1] <= 844
        assert min(box[2:]) >= 44
    page.evaluate("document.getElementById('menu').click()")
    assert page.evaluate("getComputedStyle(document.getElementById('side')).display") == "flex"
    page.evaluate("document.querySelector('.class[data-id=\"3\"]').click()")
    page.wait_for(TEXT.format("title") + " === '3'")
    assert page.evaluate("getComputedStyle(document.getElementById('side')).display") == "none"
    page.evaluate("document.getElementById('accept').click()")
    page.wait_for(SENT)
    assert served.desk.decisions.made == {entries(served, "missing", 3, 1)[0]: "accept"}
    page.evaluate("document.getElementById('mode').click()")
    assert page.evaluate(wide) == 390
    box = page.evaluate("(() => { const b = document.getElementById('picture').getBoundingClientRect(); "
                        "return [b.left, b.right, b.bottom]; })()")
    assert box[0] >= 0
    assert box[1] <= 390
    assert box[2] < 844
    page.resize(1280, 1600)
    assert page.errors == []


def test_export_says_where(served, page):
    page.press("a")
    page.wait_for(SENT)
    page.evaluate("document.querySelector('[data-export=csv]').click()")
    page.wait_for(TEXT.format("message") + ".includes('1 decisions written')")
    labels = page.evaluate("[...document.querySelectorAll('[data-export]')].map((b) => b.textContent)")
    assert all(label.startswith("save as ") for label in labels)
