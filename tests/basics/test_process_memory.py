"""The peak of a child is its own, even if the process that started it is larger."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from lacuna.basics.process_memory import peak_resident_bytes, resident_bytes


def test_a_child_does_not_inherit_its_parents_peak():
    ballast = np.ones(2**25)  # 256 MB, touched
    with subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert 2**20 < peak_resident_bytes(child.pid) < 2**27
        child.communicate(b"\n")
    assert peak_resident_bytes() >= resident_bytes() > ballast.nbytes
    assert peak_resident_bytes(child.pid) == 0  # it has ended
