"""A run's files where they are, on a disk or on object storage, and where that which commands make of a run goes.

Everything is read by URL: nothing has to be copied first. A run on a disk gets results into its own folder. One on
object storage is only read: they go into a folder of the current one, unless a URL is asked for.

A run may be read while it is written: its writer removes checkpoints that it no longer keeps, also under a reader. All
readers look through `while_written`, which starts over at what is newest then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import TypeVar

import yaml

from lacuna.basics import storage
from lacuna.basics.errors import AccessDenied, Unreachable, UserError
from lacuna.basics.yaml_text import parse_yaml
from lacuna.tools.passes.parts import absolute
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.run_folder import CONFIG

T = TypeVar("T")
_TRIES = 12
_LARGEST = 4 << 30  # of a file that is read whole; a sparse one takes no room on the disk


def while_written(run: str, look: Callable[[], T]) -> T:
    """What `look` finds out about a run or a state store; called anew when it fails and the writer has committed
    meanwhile, since that removes files. `look` opens everything itself, and leaves nothing behind when it fails."""
    for _ in range(_TRIES):
        before = _commits(run)
        try:
            return look()
        except (AccessDenied, Unreachable):
            raise
        except (UserError, FileNotFoundError) as error:
            if _commits(run) == before:
                raise
            last = error
    raise UserError(f"{run} is being written, and {_TRIES} times in a row what was looked at was replaced before it "
                    f"had been read. Nothing is damaged: try again later, or let the run keep more checkpoints or "
                    f"write fewer (train.keep, train.checkpoint_every). The last time: {last}")


def each_kept(names: Callable[[], list[str]], look: Callable[[str], T]) -> dict[str, T]:
    """What `look` finds out about each of the checkpoints or snapshots that `names` lists, oldest first; one that the
    writer removes meanwhile is left out, but the newest of them all."""
    listed, found = names(), dict[str, T]()
    for name in reversed(listed):  # the newest stays longest: the others are looked at afterwards
        try:
            found[name] = look(name)
        except (AccessDenied, Unreachable):
            raise
        except (UserError, FileNotFoundError):
            if name == listed[-1] or name in names():
                raise
    return {name: found[name] for name in listed if name in found}


def _commits(run: str) -> set[str]:
    """Names that change with every commit: checkpoints and the logs of the run and of its state."""
    found: set[str] = set()
    for place in ("checkpoints", "checkpoints/log", "state/log", "log"):
        with contextlib.suppress(NotADirectoryError):  # whoever reads it will say so
            found |= {f"{place}/{name}" for name in storage.list_names(storage.join(run, place))
                      if not name.endswith(".partial")}
    return found


def step_of(name: str) -> int:
    """Of a checkpoint's or snapshot's name; 0 for one that a person named."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def run_name(run: str) -> str:
    return absolute(run).rsplit("/", 1)[-1]


def refuse_traps(run: str) -> None:
    """A run folder may come from a stranger: a link in it could show files of the reader's on a page, and a pipe or a
    device never ends. Storage without links has neither."""
    if not storage.is_local(run):
        return
    root = os.path.realpath(storage.local_path(run))
    folders = [root] if os.path.isdir(root) else []
    while folders:
        # A scan knows what entries are without asking for each; what the run itself removes meanwhile is no trap.
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    _refuse_if_outside(entry.path, root)
                elif entry.is_dir():
                    folders.append(entry.path)
                elif not entry.is_file():
                    raise UserError(f"{entry.path}: neither a file nor a folder. Remove it: reading may never end.")


def _refuse_if_outside(link: str, root: str) -> None:
    target = os.path.realpath(link)
    if os.path.commonpath((root, target)) != root:
        raise UserError(f"{link}: a link to {target}, outside of the run folder: whoever made the folder could show "
                        "you files of yours as the run's. If you made it, put a copy in its place (state elsewhere: "
                        "train.state_url).")


def read_file(run: str, name: str) -> bytes | None:
    """None if the run has no such file."""
    where = storage.join(run, name)
    try:
        if storage.is_local(where) and os.path.getsize(storage.local_path(where)) > _LARGEST:
            raise UserError(f"{where}: larger than {_LARGEST / 1e9:.0f} GB, too much to be a run's {name}.")
        return storage.read_bytes(where)
    except (FileNotFoundError, NotADirectoryError):
        return None


def run_config(run: str) -> Config:
    """The config that a run began with, as its folder holds it."""
    refuse_traps(run)
    where, text = storage.join(run, CONFIG), read_file(run, CONFIG)
    if text is None:
        raise UserError(f"{where}: no such file, so {run} is not a run folder. Give run_folder/name of a run.")
    try:
        config = parse_config(parse_yaml(text), where)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not valid YAML ({error}).") from None
    if not isinstance(config.method.get("name"), str):
        raise UserError(f"{where}: no method.name, which every run's config has. Give run_folder/name of a run.")
    return config


def state_url(run: str, config: Config) -> str:
    """Where the run's per-sample state is, if its method keeps any."""
    return config.train.state_url or storage.join(run, "state")


def output_folder(run: str) -> str:
    """Where results about a run are written when nobody says where."""
    return absolute(run) if storage.is_local(run) else os.path.abspath(f"{run_name(run)}-{_digest(run)}")


def parts_folder(run: str, shared: bool) -> str:
    """Where the parts of a pass are written that are removed at its end; `shared`: other nodes write there too."""
    if storage.is_local(run) or shared:
        return storage.join(absolute(run), "passes")
    return os.path.join(tempfile.gettempdir(), f"lacuna-passes-{os.getuid()}", _digest(run))


def _digest(run: str) -> str:
    """Runs of one name in two buckets are two runs."""
    return hashlib.sha256(absolute(run).encode()).hexdigest()[:8]
