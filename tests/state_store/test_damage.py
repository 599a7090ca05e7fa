"""Proves that wrong schemas, damaged objects, foreign files and full disks give precise errors, not wrong rows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.basics.fence import newest_launch
from lacuna.state_store import Field
from lacuna.state_store.chunks import DamagedChunk
from lacuna.state_store.mending import drop_damaged, mend_metadata, mend_snapshot, snapshot_copy
from lacuna.state_store.verify import stats, verify
from tests.helpers.state.crash_worker import SEED, changes
from tests.helpers.state.crashes import ROOT, WORKER, finish_cleanly, last_committed, launch
from tests.helpers.state.samples import COUNTS, FIELDS, INITIALS


@pytest.fixture
def store(tmp_path):
    """A store with two snapshots of the crash worker's steps."""
    store = state_store.create(str(tmp_path / "state"), COUNTS, "index", FIELDS, SEED)
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS) as session:
        for step in range(2):
            for shard, field, rows, stored in changes(step):
                if session.slots.slot_of[shard] < 0:
                    session.lease(shard)
                session.scatter(field, np.full(len(rows), shard), rows, stored)
            for shard in {change[0] for change in changes(step)}:
                session.release(shard)
            session.finish()
            session.snapshot(f"s{step}", {"step": step})
    return store


def chunk_file(store, field: str, shard: int, snapshot: str = "s1") -> Path:
    ref = store.manifest(snapshot).refs[field][shard]
    return Path(store.url, "chunks", field, f"{shard:06d}.{ref.token}")


def test_a_sound_store_verifies(store):
    """No problems, no orphans, no strangers; statistics count what was written."""
    report = verify(store)
    assert (report.problems, report.orphans, report.foreign) == ([], [], [])
    assert report.snapshots == ["s0", "s1"]
    rows = {item.field.name: item for item in stats(store, "s1", values=True)}
    assert rows["phi"].written == 4
    assert rows["phi"].chunks == len(COUNTS)
    assert rows["ema"].values[0] >= 0
    assert rows["ema"].values[2] <= 1
    assert stats(store, "s0")[0].values is None


@pytest.mark.parametrize(("harm", "kind"), [
    (lambda f: f.unlink(), "missing"),
    (lambda f: f.write_bytes(f.read_bytes()[:-3]), "truncated"),
    (lambda f: f.write_bytes(b""), "truncated"),
    (lambda f: f.write_bytes(bytes([f.read_bytes()[0] ^ 1]) + f.read_bytes()[1:]), "corrupt"),
])
@pytest.mark.parametrize("field", ["phi", "ema"])
def test_damaged_chunks_are_named(store, harm, kind, field):
    """A lost, torn or flipped chunk is an error at the lease that names field, shard and file; verify lists it."""
    path = chunk_file(store, field, 1)
    harm(path)
    problems = verify(store).problems
    assert [(p.kind, Path(p.object).name, p.snapshots) for p in problems] == [(kind, path.name, ("s1",))]
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS, snapshot="s1") as session:
        with pytest.raises(DamagedChunk, match=rf"'{field}', shard 1.*{path.name}.*{kind}.*verify"):
            session.lease(1)
        with pytest.raises(UserError):  # the session does not go on with a hole
            session.lease(0)
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS, snapshot="s0") as session:
        session.lease(1)


def test_a_swapped_chunk_is_noticed(store):
    """A whole chunk of another version under the right name does not pass: the manifest knows its checksum."""
    shutil.copy(chunk_file(store, "moment", 2, "s0"), chunk_file(store, "moment", 2, "s1"))
    assert [p.kind for p in verify(store, ["s1"]).problems] == ["corrupt"]


def test_never_written_is_not_lost(store):
    """Shard 5 was never written: it reads as initial values and verifies."""
    assert 5 not in store.manifest("s1").refs["phi"]
    expected = FIELDS[0].initial_rows(SEED, 5, COUNTS[5])
    np.testing.assert_array_equal(store.reader("s1", INITIALS).read_shard("phi", 5), expected)


def test_damaged_metadata(store):
    """Truncated group metadata, log entries and manifests are told apart; one bad snapshot hides no other."""
    entry = store.entry("s1")
    manifest = Path(store.url, "manifests", entry.manifest + ".json")
    manifest.write_bytes(manifest.read_bytes()[:-10])
    fresh = state_store.open(store.url)
    with pytest.raises(UserError, match=r"manifest is damaged.*verify --repair"):
        fresh.manifest("s1")
    assert [(p.kind, p.snapshots) for p in verify(fresh).problems] == [("metadata", ("s1",))]
    launch = fresh.begin_launch()  # a launch is still possible, and removes nothing that the manifest may need
    fresh.delete_snapshot("s1", launch)
    with fresh.session(launch, budget=10**6, initials=INITIALS, snapshot="s0") as session:
        session.lease(1)
    fresh.begin_launch()
    assert verify(fresh).problems == []
    assert fresh.orphans() == []
    log = Path(store.url, "log", "00000001.json")
    text = log.read_bytes()
    log.write_bytes(text[: len(text) // 2])
    damaged = state_store.open(store.url)
    assert [entry.name for entry in damaged.snapshots()] == ["s0"]  # it was a launch's, long ago
    assert [(p.kind, Path(p.object).name) for p in verify(damaged).problems] == [("metadata", "00000001.json")]
    assert damaged.begin_launch() > launch + 1
    group, copy = Path(store.url, "zarr.json"), Path(store.url, "schema.json")
    group.write_bytes(group.read_bytes()[:50])
    assert not state_store.open(store.url).schema.differences(store.schema)
    copy.write_bytes(copy.read_bytes().replace(b'"seed": 11', b'"seed": 12'))
    with pytest.raises(UserError, match=r"zarr.json: not a Lacuna state store, or its metadata are truncated"):
        state_store.open(store.url)
    group.unlink()
    with pytest.raises(UserError, match=r"schema.json: damaged schema \(its checksum does not fit\)"):
        state_store.open(store.url)


def test_a_copy_mends_a_snapshot(store):
    """Entry or manifest or both gone: a snapshot's copy brings back what reads the same; another's says what it is."""
    copy, before = snapshot_copy(store, "s1"), store.reader("s1", INITIALS).read_shard("phi", 1)
    for harm in ("entry", "manifest", "both"):
        entry = state_store.open(store.url).entry("s1")
        if harm != "manifest":
            Path(store.url, "log", f"{entry.number:08d}.json").write_text("{}")
        if harm != "entry":
            Path(store.url, "manifests", entry.manifest + ".json").unlink()
        damaged = state_store.open(store.url)
        mended = mend_snapshot(damaged, copy, damaged.fence.begin())
        assert len(mended) == 2 if harm == "both" else harm in mended[0]
        assert mend_snapshot(damaged, copy, newest_launch(damaged.fence.entries())) == []
        drop_damaged(damaged, newest_launch(damaged.fence.entries()))
        assert verify(damaged).problems == []
        np.testing.assert_array_equal(damaged.reader("s1", INITIALS).read_shard("phi", 1), before)
    with pytest.raises(UserError, match="does not fit its checksum"):
        mend_snapshot(damaged, copy.replace(b"1-0-", b"2-0-"), newest_launch(damaged.fence.entries()))


def test_what_no_copy_brings_back_is_dropped(store):
    """A snapshot without manifest and copy goes, the others stay, and the store is tidy again."""
    entry = store.entry("s1")
    Path(store.url, "manifests", entry.manifest + ".json").unlink()
    Path(store.url, "phi", "zarr.json").unlink()
    damaged = state_store.open(store.url)
    launch = damaged.fence.begin()
    assert mend_metadata(damaged) == ["phi/zarr.json"]
    assert ["snapshot s1" in line for line in drop_damaged(damaged, launch)] == [True]
    assert [entry.name for entry in damaged.snapshots()] == ["s0"]
    damaged.remove_orphans()
    report = verify(damaged)
    assert (report.problems, report.orphans) == ([], [])


def test_a_damaged_histogram_is_counted_anew(store):
    """Gone or torn counts are taken from the values; the session starts with the same ones."""
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS, snapshot="s1") as session:
        fields = [field.name for field in FIELDS if field.histogram]
        expected = [session.histogram(name)[0] for name in fields]
    assert fields
    for path in Path(store.url, "histograms").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with store.session(store.begin_launch(), budget=10**6, initials=INITIALS, snapshot="s1") as session:
        for name, counts in zip(fields, expected, strict=True):
            np.testing.assert_array_equal(session.histogram(name)[0], counts)


def test_missing_store_and_second_create(store, tmp_path):
    """Opening nothing and creating twice are refused with the URL."""
    with pytest.raises(UserError, match=r"nowhere: no state store here"):
        state_store.open(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="already a store"):
        state_store.create(store.url, COUNTS, "index", FIELDS, SEED)
    text = Path(store.url, "zarr.json").read_text().replace('"version": 2', '"version": 7')
    Path(store.url, "zarr.json").write_text(text)
    with pytest.raises(UserError, match=r"version 7, this program reads version 2"):
        state_store.open(store.url)


def test_foreign_files_are_left_alone(store):
    """Files that are not ours are named by verify and survive tidying; a crash's leftovers do not."""
    strangers = ["notes.txt", "chunks/phi/readme", "chunks/other", "log/old.json", "manifests/x"]
    for name in strangers:
        Path(store.url, name).write_text("mine")
    Path(store.url, "chunks/phi/000003.1-0-999").write_bytes(b"half a chu")
    Path(store.url, "chunks/phi/000003.1-0-98.0123abcd.partial").write_bytes(b"ha")
    report = verify(store)
    assert sorted(report.foreign) == sorted(strangers)
    assert sorted(report.orphans) == ["chunks/phi/000003.1-0-98.0123abcd.partial", "chunks/phi/000003.1-0-999"]
    store.begin_launch()
    assert verify(store).orphans == []
    assert all(Path(store.url, name).exists() for name in strangers)


@pytest.mark.parametrize(("change", "message"), [
    ({"fingerprint": "other"}, r"shard index index .* in the store, other .* asked .*reshard"),
    ({"counts": [*COUNTS[:-1], 12]}, "53 samples"),
    ({"seed": 3}, "seed 11 in the store, 3 asked"),
    ({"fields": FIELDS[1:]}, "field 'phi' is in the store but not asked for"),
    ({"fields": [*FIELDS, Field("extra", (2,), "int8")]}, "field 'extra' is asked for but not in the store"),
    ({"fields": [Field("phi", (9,), "float32"), *FIELDS[1:]]}, "field 'phi': dtype float16 in the store, float32"),
])
def test_opening_with_another_schema_is_refused(store, change, message):
    """Other fields, dtypes, seed, shards or class list: the message says what differs."""
    arguments = {"counts": COUNTS, "fingerprint": "index", "fields": FIELDS, "seed": SEED, **change}
    with pytest.raises(UserError, match=f"(?s){message}"):
        state_store.open(store.url, **arguments)
    state_store.open(store.url, COUNTS, "index", FIELDS, SEED)


def test_bad_shards_are_refused(tmp_path):
    """No shards, no fields, two fields of one name and a chunk beyond the codec's limit are errors at creation."""
    url, one = str(tmp_path / "s"), Field("a", (1,), "int8")
    for counts, fields, message in [([], [one], "at least one shard"), ([0], [one], "at least one shard"),
                                    ([3], [], "at least one field"), ([3], [one, one], "must differ"),
                                    ([10**6], [Field("a", (1000,), "float32")], "4.0 GB in one chunk")]:
        with pytest.raises(UserError, match=message):
            state_store.create(url, counts, "f", fields)


def test_disk_full_is_a_clear_error(tmp_path):
    """A write that the system refuses ends the run with one message; the last snapshot and the next launch are fine."""
    url = str(tmp_path / "state")
    assert launch(url, 2).wait(300) == 0
    script = (f"import resource, runpy, sys; sys.argv = ['w', {url!r}, '3']\n"
              "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
              f"runpy.run_path({str(WORKER)!r}, run_name='__main__')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    finish_cleanly(url, last_committed(url))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_run_cleanly(tmp_path, number):
    """Ctrl-C and SIGTERM end a run; nothing committed is lost and the next launch goes on."""
    url = str(tmp_path / "state")
    process = launch(url, 100_000)
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    after = last_committed(url)
    assert after >= 2
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err
        assert not os.listdir(Path(url, "claims"))
    finish_cleanly(url, after)
