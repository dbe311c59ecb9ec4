"""Compares the kernels' instructions with the committed ones: it proves that a change leaves the kernels alone.

It compiles the kernels of the plans in tests/data/sass.csv with Triton 3.6 for sm_90, and compares the SASS without the
offsets of parameters. It compiles without line information: where code is inlined from other functions, this puts
labels into the PTX, and they change the order in which the assembler puts instructions.
From the repository root:

    python tests/sass.py
    python tests/sass.py --renew    writes the instructions anew; say in bench/NOTES.md what changed
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from compiling import worker_processes
from planning import make_problem, meta_call

from fusednorm.planner.device import H200
from fusednorm.planner.plan import from_text

DATA = Path(__file__).parent / "data"
HASHES = DATA / "sass.csv"
RELEASE = "3.6."  # of Triton


class Build(NamedTuple):
    """A kernel of a plan, whose text is `plan`."""

    direction: str
    norm: str
    cols: int
    plan: str
    kernel: str

    def launch(self):
        from fusednorm.host import launch

        problem = make_problem(self.norm, self.cols, direction=self.direction)
        launches = launch.on_tensors(meta_call(problem), from_text(self.plan)).launches
        return next(each for each in launches if each.kernel.__name__ == self.kernel)


def digest(build: Build) -> tuple[int, str]:
    """The number of instructions, and a hash of them."""
    from fusednorm.tools import compilation

    text = instructions(compilation.compile_for(build.launch(), H200.arch).asm["cubin"])
    return len(text), hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def instructions(cubin: bytes) -> list[str]:
    """SASS without addresses, encodings and the offsets of parameters."""
    from bench.resources import CUOBJDUMP

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*?) *;", dump)
    assert lines, "cuobjdump must list instructions"
    return [re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", "c[0x0][parameter]", line) for line in lines]


def digests(builds: list[Build]) -> dict[Build, tuple[int, str]]:
    from tqdm import tqdm

    with worker_processes() as pool:
        return dict(zip(builds, tqdm(pool.map(digest, builds), total=len(builds), smoothing=0), strict=True))


def committed() -> dict[Build, tuple[int, str]]:
    with HASHES.open() as file:
        return {
            Build(row["direction"], row["norm"], int(row["cols"]), row["plan"], row["kernel"]): (
                int(row["instructions"]),
                row["hash"],
            )
            for row in csv.DictReader(file)
        }


def renew() -> None:
    found = digests(list(committed()))
    with HASHES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Build._fields, "instructions", "hash"])
        writer.writerows([*build, *found[build]] for build in found)


def compare() -> int:
    """Prints the builds whose instructions differ from the committed ones, and returns their number."""
    wanted = committed()
    found = digests(list(wanted))
    changed = [build for build in wanted if found[build] != wanted[build]]
    for build in changed:
        print(f"{build}: {wanted[build][0]} instructions were committed, got {found[build][0]}, not the same")
    print(f"{len(changed)} of {len(wanted)} builds have changed")
    return len(changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--renew", action="store_true", help="write what is there now")
    options = parser.parse_args()
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # processes that compile inherit it
    import triton

    if not triton.__version__.startswith(RELEASE):
        parser.error(f"instructions are compared as Triton {RELEASE}x makes them, got {triton.__version__}")
    if options.renew:
        renew()
        return 0
    return compare() > 0


if __name__ == "__main__":
    raise SystemExit(main())
