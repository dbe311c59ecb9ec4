"""The processes that tests run code in (tests/afresh.py)."""

from __future__ import annotations

import afresh
import pytest

ASKS_FOR_GPUS = "torch.testing._internal.common_cuda"  # as it is imported: CUDA does not work in a fork then
CODE = "import sys, torch; print(sys.argv[1:], torch.cuda._is_in_bad_fork()); sys.exit(len(sys.argv))"


@pytest.mark.parametrize("after", ["torch", ASKS_FOR_GPUS])
def test_cuda_may_be_used_whatever_was_imported_before(after):
    ran = afresh.run(CODE, "some", "words", after=after)
    assert (ran.returncode, ran.stdout) == (3, "['some', 'words'] False\n"), ran.stderr
