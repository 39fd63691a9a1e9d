"""What malloc keeps while steps are timed. In a fresh process each: where a block lies hangs on all that was there before."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")

HEAD = """
import resource

import torch

from recals_exp.meters.heap import freed_memory_kept
from recals_exp.meters.memory import resident_bytes
from recals_exp.meters.timing import steady_process

MOST = 32 << 20  # bytes; a block is twice that


def faults_of_one_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2 * MOST // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def fewest_faults():
    # of some blocks: the first ones find the place where they stay
    return min(faults_of_one_block() for _ in range(8))


assert fewest_faults() > 10  # with huge pages far fewer than pages, but never none
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", HEAD + script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_freed_memory_stays_inside_and_goes_back_at_the_end() -> None:
    run("""
before = resident_bytes()
with freed_memory_kept():
    with freed_memory_kept():
        pass
    assert fewest_faults() < 10
    assert resident_bytes() > before + MOST
assert resident_bytes() < before + MOST  # a hole in the heap may stay, without its pages
""")


def test_it_stays_while_steps_are_timed() -> None:
    run("""
with steady_process():
    assert fewest_faults() < 10
""")


def test_an_error_inside_ends_it() -> None:
    run("""
try:
    with freed_memory_kept():
        raise RuntimeError
except RuntimeError:
    pass
assert fewest_faults() > 10
""")
