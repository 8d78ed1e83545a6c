"""Measurement of memory for the benchmark."""

from __future__ import annotations

import subprocess
import sys

from analytics.benchmark import sum_resident_bytes

_FORKED = """
import os, sys
held = bytearray(96 << 20)
if os.fork():
    print("both", flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_fork_counts_once() -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 96 << 20 < sum_resident_bytes(child.pid) < 190 << 20
        assert child.stdin is not None
        child.stdin.close()
