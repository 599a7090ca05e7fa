"""Label Studio: tasks to import (known labels as annotations, suggestions as predictions), and what it exports.

Two choices of several per image: `present` and `absent`; what is in neither is unknown. The XML file is the project's
labelling setup. Scores of single classes stand in the task's data, since Label Studio has one score per prediction.
"""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.exchange.bundle import IMAGES, Bundle, Marks, key_of, read_about, read_json, write_json

FILE, SETUP = "tasks.json", "setup.xml"
PREFIX = "/data/local-files/?d="  # Label Studio's own, for files below its document root
_CONTROLS = {"present": "In the image", "absent": "Not in the image"}


def write(bundle: Bundle, out: str, prefix: str = PREFIX) -> None:
    choices = "".join(f"\n    <Choice value={quoteattr(name)}/>" for name in bundle.classes)
    controls = "".join(f'\n  <Header value="{title}"/>\n  <Choices name="{name}" toName="image" choice="multiple">'
                       f"{choices}\n  </Choices>" for name, title in _CONTROLS.items())
    setup = f'<View>\n  <Image name="image" value="$image"/>{controls}\n</View>\n'
    storage.write_atomic(storage.join(out, SETUP), setup.encode())
    tasks = []
    for number, (key, marks) in enumerate(bundle.samples.items(), 1):
        task: dict = {"id": number, "data": {"image": f"{prefix}{IMAGES}/{bundle.files.get(key, key)}", "key": key,
                                             "scores": marks.suggested}}
        if marks.positives or marks.negatives:
            task["annotations"] = [{"result": [_result(control, names) for control, names in (
                ("present", marks.positives), ("absent", marks.negatives)) if names]}]
        if marks.suggested:
            score = min(marks.suggested.values())
            result = _result("present", bundle.ordered(marks.suggested))
            task["predictions"] = [{"model_version": "lacuna", "score": score, "result": [{**result, "score": score}]}]
        tasks.append(task)
    write_json(out, FILE, tasks)


def _result(control: str, names: list[str]) -> dict:
    return {"from_name": control, "to_name": "image", "type": "choices", "value": {"choices": names}}


def read(folder: str) -> Bundle:
    """Of a task the last annotation that was not cancelled; predictions and their scores are suggestions."""
    tasks = read_json(folder, FILE)
    samples: dict[str, Marks] = {}
    try:
        for task in tasks:
            data = task["data"]
            marks = samples[str(data["key"]) if "key" in data else key_of(str(data["image"]))] = Marks()
            done = [one for one in task.get("annotations", ()) if not one.get("was_cancelled")]
            for result in done[-1]["result"] if done else ():
                if result["from_name"] in _CONTROLS:
                    part = marks.positives if result["from_name"] == "present" else marks.negatives
                    part += [str(name) for name in result["value"]["choices"]]
            known = {*marks.positives, *marks.negatives}
            marks.suggested |= {str(name): float(score) for name, score in (data.get("scores") or {}).items()
                                if name not in known}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{storage.join(folder, FILE)}: not Label Studio's JSON ({type(error).__name__}: {error}). "
                        "Export it there as JSON (not JSON-MIN) under this name.") from None
    used = dict.fromkeys(name for marks in samples.values() for name in (*marks.positives, *marks.negatives,
                                                                         *marks.suggested))
    return Bundle(read_about(folder).get("classes", list(used)), samples)
