"""AOTInductor packages, each made, loaded and run in a process of its own: a package that cannot be loaded may crash
its process.

As a command, with the model "written" or "stock" and the type of a device:

    PYTHONPATH=.:tests python tests/aot_package.py written cpu
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import afresh
import pytest

ROOT = Path(__file__).parent.parent
COMPILER = "torch._inductor.compile_fx"
DONE = "as exact as eager"


def check_package(device: str, cache: Path) -> None:
    """Fails unless the package of a model that calls our ops by name, once with a mask, gives eager mode's results."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler")

    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}

    def run(model: str, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, __file__, model, device]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment | more)

    written = afresh.run_module("tests.aot_package", "written", device, environment=environment, after=COMPILER)
    if written.returncode < 0:
        # It crashed. Packages have mixed symbols of PyTorch's libstdc++ and the compiler's: load the compiler's first.
        library = subprocess.check_output([compiler, "-print-file-name=libstdc++.so.6"], text=True).strip()
        written = run("written", LD_PRELOAD=library)
    if written.returncode < 0 and run("stock").returncode < 0:
        pytest.skip("AOTInductor's packages of stock models crash this process, too")
    assert written.stdout.endswith(DONE + "\n"), written.stderr


def main(name: str, device: str) -> None:
    import torch
    from torch import nn

    import fusednorm

    ops, width = torch.ops.fusednorm, 256

    class Stock(nn.Module):
        def forward(self, dy, x, weight):
            return (x * weight,)

    class Written(nn.Module):
        def forward(self, dy, x, weight):
            y, rstd = ops.rms_norm_fwd(x, [width], weight, 1e-5)
            dx, _ = ops.rms_norm_bwd(dy, x, [width], rstd, weight, [True, False])
            return y, dx, *ops.rms_norm_bwd(dy, x, [width], rstd, weight, [True, True])

    model = {"stock": Stock, "written": Written}[name]()
    x, dy = (torch.randn(16, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    arguments = (dy, x, x[0].clone())
    exported = torch.export.export(model, arguments)
    with fusednorm.enable_inductor():
        package = torch._inductor.aoti_compile_and_package(exported)
    loaded = torch._inductor.aoti_load_package(package)
    for got, want in zip(loaded(*arguments), model(*arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    print(DONE)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(*sys.argv[1:])
