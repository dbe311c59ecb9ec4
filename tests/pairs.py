"""Runs the tests that depend on PyTorch and Triton with each supported pair of their releases, without a GPU.

    python tests/pairs.py                                     # all pairs: some ten minutes a pair on two cores
    python tests/pairs.py --torch 2.11.0 --suites native      # one pair, one suite

Each pair has a virtual environment of its own in --folder, made on first use. It holds torch, Triton and what these
need, 5 GB with CUDA's libraries, and takes everything else from this Python. The tests build the C++ host side. Ends
with a table; exit code 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from environments import python_with

ROOT = Path(__file__).parent.parent
SHOWN_LINES = 60  # of what failing tests print
SIDE_BY_SIDE = "--numprocesses", "2", "--dist", "worksteal"
PAIRS = {"2.11.0": "3.6.0", "2.13.0": "3.7.1", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}  # Triton by torch
SUITES = {  # tests/ROOM/test_NAME.py as ROOM/NAME, and folders as FOLDER/
    "face": "face/autograd face/compiled_face face/errors face/functional face/modulated face/modules face/norm_forms "
    "face/ops face/opinfo face/overrides face/packed face/public_face heads/qk_norm tools/oracle host/torch_compat "
    "integrations/drop_in integrations/eager integrations/export integrations/models",
    "compile": "kernels/compile integrations/folding integrations/inductor integrations/paying",
    "dynamo": "integrations/forwards integrations/gated_classes integrations/gates_in_graphs integrations/hf_models "
    "integrations/joins integrations/modulations integrations/packing integrations/random_graphs "
    "integrations/recognition integrations/rotating integrations/rotations integrations/written",
    "sharding": "face/distributed",
    "interpreter": "columns/column_sum host/fallback kernels/interpreter kernels/multiwave kernels/partial_sums "
    "kernels/row_moments tools/demo",
    "native": "host/launcher host/native host/native/ host/prepared host/triton_compat tools/doctor tools/warm",
    "simulator": "simulator/ kernels/simulated/",
}


def environment(torch: str, folder: Path) -> Path:
    return python_with({"torch": torch, "triton": PAIRS[torch]}, folder)


def path_of(name: str) -> str:
    return f"tests/{name}" if name.endswith("/") else "tests/{}/test_{}.py".format(*name.split("/"))


def run(torch: str, suite: str, folder: Path) -> str:
    """pytest's own count, such as "12 passed, 1 skipped"; the rest of its output goes to a file."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = str(ROOT)
    files = [path_of(name) for name in SUITES[suite].split()]
    command = [environment(torch, folder), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *SIDE_BY_SIDE, *files]
    said = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    log = folder / f"torch-{torch}-{suite}.log"
    log.write_text(said.stdout + said.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", (said.stdout.splitlines() or [""])[-1])
    if said.returncode:
        print(*said.stdout.splitlines()[-SHOWN_LINES:], f"torch {torch}, {suite}: see {log}", sep="\n", file=sys.stderr)
        counts = counts if any("failed" in each or "error" in each for each in counts) else ["not run: error"]
    return ", ".join(counts)


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", choices=PAIRS, default=list(PAIRS), metavar="RELEASE")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cells = {}
    with tqdm(total=len(options.torch) * len(options.suites), unit="suite") as progress:
        for torch in options.torch:
            for suite in options.suites:
                progress.set_description(f"torch {torch}, {suite}")
                cells[torch, suite] = run(torch, suite, folder)
                progress.update()
    print("| torch | Triton | " + " | ".join(options.suites) + " |")
    print("|---|---|" + "---|" * len(options.suites))
    for torch in options.torch:
        print(f"| {torch} | {PAIRS[torch]} | " + " | ".join(cells[torch, suite] for suite in options.suites) + " |")
    return any("failed" in said or "error" in said for said in cells.values())


if __name__ == "__main__":
    sys.exit(main())
