"""What malloc keeps while steps are timed."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from recals_exp.meters.heap import freed_memory_kept
from recals_exp.meters.memory import resident_bytes
from recals_exp.meters.timing import steady_process

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")

FLOATS = 16 << 20
NBYTES = 4 * FLOATS


def faults_of_one_block() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(FLOATS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_stays_inside_and_goes_back_at_the_end() -> None:
    assert faults_of_one_block() > 10  # or huge pages: far fewer faults than pages, but never none
    before = resident_bytes()
    with freed_memory_kept():
        faults_of_one_block()
        with freed_memory_kept():
            pass
        assert resident_bytes() > before + NBYTES / 2
        assert faults_of_one_block() < 10
    assert resident_bytes() < before + NBYTES / 2
    assert faults_of_one_block() > 10


def test_it_stays_while_steps_are_timed() -> None:
    with steady_process():
        faults_of_one_block()
        assert faults_of_one_block() < 10


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(RuntimeError, match="inside"), freed_memory_kept():
        raise RuntimeError("inside")
    assert faults_of_one_block() > 10
