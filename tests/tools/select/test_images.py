"""Proves that chosen images equal a slow choice from scratch, and that no batch has too many samples of a group."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lacuna.data_pipelines.groups import Groups, make_groups
from lacuna.data_pipelines.index import ShardIndex
from lacuna.tools.select.choosing import Wish, choose
from lacuna.tools.select.images import choose_images
from lacuna.tools.select.questions import Questions
from lacuna.tools.select.quota import Quota
from lacuna.tools.select.scores import LEAST_NOVELTY
from tests.helpers.scored_shards import open_samples, scored_shards

Sample = tuple[int, int]


@pytest.fixture(scope="module")
def groups(single_shards) -> Groups:
    """Every seven samples that follow each other are one; a third of the samples are in none."""
    index = ShardIndex.load(str(single_shards / "train"))
    keys = [key for shard in range(len(index.shards)) for key in index.members(shard).keys]
    number = {key: i for i, key in enumerate(keys)}
    return make_groups(index, "sevens", lambda key: None if number[key] % 3 == 0 else str(number[key] // 7), {})


def positives(classes: int) -> np.ndarray:
    return np.arange(classes) ** 2 * 3


def naive_images(scored, budget: int, known: np.ndarray, groups: Groups | None, each: int) -> list[Sample]:
    """Before every choice, each candidate is judged anew against all that were chosen or decided before.

    Candidates are all samples; of a group those that are worth most at the start.
    """
    samples, typical = open_samples(scored), max(1.0, float(np.median(known)))

    def worth(at: Sample, have: np.ndarray) -> float:
        return sum(belief / np.sqrt(1 + have[cls] / typical) for cls, belief in samples[at][0].items())

    def group(at: Sample) -> int:
        return int(groups.by_shard[at[0]][at[1]]) if groups else -1

    falling = sorted((at for at in samples if samples[at][0]), key=lambda at: -worth(at, known))
    options = [at for place, at in enumerate(falling)
               if group(at) < 0 or sum(group(other) == group(at) for other in falling[:place]) < each]
    before = sorted({entry[:2] for entry in scored.decided})
    mean = np.mean([samples[at][1] for at in (*options, *before)], axis=0)
    apart = {at: (v - mean) / np.linalg.norm(v - mean) for at, (_, v) in samples.items()}
    chosen = list[Sample]()
    while len(chosen) < budget:
        have = known + np.array([sum(samples[at][0].get(c, 0.0) for at in chosen) for c in range(len(known))])
        values = {}
        for at in options:
            near = max([max(0.0, float(apart[at] @ apart[other])) for other in (*chosen, *before)], default=0.0)
            if at not in chosen and 1 - near >= LEAST_NOVELTY:
                values[at] = worth(at, have) * (1 - near)
        if not values:
            break
        chosen.append(max(values, key=values.__getitem__))
    return chosen


def images(questions: Questions) -> list[Sample]:
    return list(dict.fromkeys(entry[:2] for entry in questions.entries()))


@pytest.mark.parametrize("each", [None, 1, 2])
def test_images_by_gain_equal_a_choice_from_scratch(single_shards, groups, tmp_path, each):
    decided = {(0, row, cls): cls % 3 == 0 for row in (2, 4) for cls in range(10)}
    scored = scored_shards(str(single_shards / "train"), tmp_path, 3, 12, decided)
    quota = Quota(groups if each else None, each or 1)
    known = positives(10)
    found = choose_images(scored, Wish("gain", 25, known), quota)
    expected = naive_images(scored, 25, known, groups if each else None, each or 1)
    assert images(found) == expected
    assert len(expected) == 25
    samples = open_samples(scored)
    for at in expected:
        asked = [(cls, score) for (s, r, cls), score in zip(found.entries(), found.scores.tolist(), strict=True)
                 if (s, r) == at]
        assert [cls for cls, _ in asked] == sorted(samples[at][0], key=lambda c: -samples[at][0][c])
        assert dict(asked) == samples[at][0], "every open entry of the image, the likeliest first"


def test_diverse_images_are_farthest_first(single_shards, tmp_path):
    """After the first, each is as far from its nearest one before as any sample is."""
    scored = scored_shards(str(single_shards / "train"), tmp_path, 4, 6)
    found = images(choose_images(scored, Wish("diverse", 12, positives(10)), Quota()))
    samples = open_samples(scored)
    mean = np.mean([v for _, v in samples.values()], axis=0)
    apart = {at: (v - mean) / np.linalg.norm(v - mean) for at, (_, v) in samples.items()}
    for place in range(1, len(found)):
        nearest = {at: max(max(0.0, float(apart[at] @ apart[c])) for c in found[:place]) for at in samples}
        assert nearest[found[place]] == pytest.approx(min(nearest.values()), abs=1e-5)


@pytest.mark.parametrize("by", ["gain", "diverse", "uncertain", "random"])
@pytest.mark.parametrize("chooser", [choose, choose_images])
def test_no_group_is_asked_too_often(single_shards, groups, tmp_path, by, chooser):
    scored = scored_shards(str(single_shards / "train"), tmp_path, 5, 8)
    wish = Wish(by, 60, positives(10))
    free, bound = (images(chooser(scored, wish, quota)) for quota in (Quota(), Quota(groups, 1)))
    counts = [Counter(g for s, r in found if (g := int(groups.by_shard[s][r])) >= 0) for found in (free, bound)]
    assert max(counts[0].values()) > 1, "without groups some are asked twice, so the next line says something"
    assert max(counts[1].values()) == 1
    assert any(groups.by_shard[s][r] < 0 for s, r in bound)
    assert len(set(chooser(scored, wish, Quota(groups, 1)).entries())) >= 60


def test_uncertain_entries_with_groups_equal_a_walk_down_the_list(single_shards, groups, tmp_path):
    scored = scored_shards(str(single_shards / "train"), tmp_path, 6, 8)
    found = choose(scored, Wish("uncertain", 40, positives(10)), Quota(groups, 1)).entries()
    flat = [(abs(b - 0.5), cls, at) for at, (beliefs, _) in open_samples(scored).items() for cls, b in beliefs.items()]
    best: dict[tuple[int, int], tuple] = {}  # of a class and group, the entry that is nearest to 0.5
    for far, cls, at in flat:
        group = int(groups.by_shard[at[0]][at[1]])
        if group >= 0:
            best[cls, group] = min(best.get((cls, group), (9.0,)), (far, at))
    expected, taken = [], dict[int, Sample]()
    for far, cls, at in sorted(flat):
        group = int(groups.by_shard[at[0]][at[1]])
        if group < 0 or (best[cls, group] == (far, at) and taken.setdefault(group, at) == at):
            expected.append((*at, cls))
    assert found == expected[:40]


def test_few_classes_of_an_image(single_shards, tmp_path):
    scored = scored_shards(str(single_shards / "train"), tmp_path, 7, 8)
    found = choose_images(scored, Wish("random", 9, positives(10), per_image=3), Quota())
    assert Counter(entry[:2] for entry in found.entries()) == dict.fromkeys(images(found), 3)
    again = choose_images(scored, Wish("random", 9, positives(10), seed=1, per_image=3), Quota())
    assert images(again) != images(found)
