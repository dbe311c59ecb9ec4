"""Random calls of every op against float64: `python -m tests.fuzz --help`, `make fuzz-gpu`.

draw.py     a call from its number; the table of ops says which operands there are
others.py   calls of the ops without a table: norms of q and k, column sums
wide.py     an op's formula in float64: exactly, and with the errors of each operation
check.py    one call: its outputs, the bound of their errors, and what went wrong
workers.py  processes that run calls, with limits of time
__main__    the command, and its progress
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # cases.py
