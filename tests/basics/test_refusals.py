"""Proves that what the system refuses becomes one true sentence, whoever reports it."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from lacuna.basics.refusals import refusal
from tests.helpers.small_disk import fill

OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(("code", "words"), [
    (errno.ENOSPC, "/tmp/x: there is no space left on its disk ("), (errno.EDQUOT, "the disk quota is used up"),
    (errno.EROFS, "its file system is mounted read-only"), (errno.EACCES, f"user {os.getuid()} may not do that there"),
    (errno.EPERM, "whether it is immutable"), (errno.EMFILE, f"the limit is {OPEN_FILES}; raise"),
    (errno.EIO, "its storage is gone or fails"), (errno.ESTALE, "its storage is gone or fails"),
    (errno.ENOTCONN, "its storage is gone or fails"), (errno.ENOENT, "no longer mounted?"),
])
def test_what_each_refusal_says(code, words):
    assert words in refusal(OSError(code, os.strerror(code), "/tmp/x"))


def test_what_is_not_the_systems_is_left_alone():
    assert refusal(ValueError("x")) is None
    assert refusal(OSError("no number")) is None
    assert refusal(RuntimeError("size mismatch")) is None


def test_libraries_words_for_a_full_disk(small_disk):
    """torch and safetensors name it in their own ways, or not at all."""
    fill(small_disk)
    tensors = {"a": torch.zeros(100_000)}
    for write in (lambda: torch.save(tensors, small_disk / "a.pt"),
                  lambda: save_file(tensors, small_disk / "b.safetensors")):
        with pytest.raises(Exception) as caught:
            write()
        assert "MB are free" in refusal(caught.value, str(small_disk)), caught.value
