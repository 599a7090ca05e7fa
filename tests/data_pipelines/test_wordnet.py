"""Proves that WordNet's own files are read: meanings in order, singulars, and everything below a synset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.wordnet import WordNet
from tests.helpers.small_wordnet import SYNSETS, WNID, write_wordnet


def test_meanings_and_kinds(tmp_path):
    wordnet = WordNet.load(write_wordnet(tmp_path / "wordnet"))
    assert wordnet.meanings("kite") == [WNID.format(22), WNID.format(15)]
    assert wordnet.meanings("Traffic light") == wordnet.meanings("traffic_lights") == [WNID.format(23)]
    assert wordnet.meanings("huskies") == [WNID.format(13)]
    assert wordnet.meanings("unicorn") == []
    assert wordnet.below(WNID.format(11)) == {WNID.format(n) for n in (11, 12, 13, 24)}
    assert wordnet.parents[WNID.format(24)] == [WNID.format(11), WNID.format(20)]
    assert wordnet.words[WNID.format(21)] == ["mouse", "computer mouse"]
    assert wordnet.glosses[WNID.format(12)] == SYNSETS[12][2]


def test_what_is_not_wordnet_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--wordnet .*nowhere: there is no data\.noun\. .*wordnet-base"):
        WordNet.load(str(tmp_path / "nowhere"))
    folder = Path(write_wordnet(tmp_path / "wordnet"))
    (folder / "index.noun").write_text("dog n many\n")
    with pytest.raises(UserError, match=r"index\.noun, line 1: not as WordNet's files"):
        WordNet.load(str(folder))
    (folder / "data.noun").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"data\.noun: not as WordNet's files"):
        WordNet.load(str(folder))


def test_the_real_one():
    folder = os.environ.get("LACUNA_WORDNET", "/usr/share/wordnet")
    if not Path(folder, "data.noun").exists():
        pytest.skip("no WordNet here: set LACUNA_WORDNET")
    wordnet = WordNet.load(folder)
    assert wordnet.meanings("dog")[0] == "n02084071"
    assert "n02099601" in wordnet.below("n02084071")  # golden retriever
    assert len(wordnet.below("n00001740")) > 70_000
