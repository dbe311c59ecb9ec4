"""Our launcher, which bypasses Triton's, must give the driver exactly what Triton's launcher gives it.

No GPU is needed: a fake driver records its arguments.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from compiling import worker_processes
from planning import make_problem, meta_call

from fusednorm.host import triton_compat
from fusednorm.host.triton_compat import RELEASES

PROBLEMS = [
    make_problem("layer", 4096),  # tensor maps
    make_problem("layer", 16384),  # tensor maps and a cluster
    make_problem("rms", 1001, direction="forward"),  # no tensor map, a float
]


class Driver:
    """Stands in for Triton's driver, and records launches."""

    def __init__(self):
        self.launched: list[tuple] = []
        self.utils = SimpleNamespace(
            launch=lambda *arguments: self.launched.append(arguments),
            fill_tma_descriptor=self.encode,
            fill_tma_descriptor_tiled=self.encode,
            build_signature_metadata=tuple,
        )

    @staticmethod
    def encode(*arguments) -> tuple:
        return "map", *map(str, arguments)


def launches(problem) -> list[tuple[list, list]]:
    """For each kernel, the driver's arguments from Triton's launcher and from ours; in a process that can compile."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver as runtime

    from fusednorm.host import launch, launcher
    from fusednorm.tools import compilation

    fake = Driver()
    prepare = launch.prepare_forward if problem.direction == "forward" else launch.prepare_backward
    made = SimpleNamespace(launch=fake.utils.launch)
    found = []
    # Meta tensors have no memory: both launchers get this address for each.
    with (
        mock.patch.object(runtime, "_active", fake),
        mock.patch.object(nvidia, "PyKernelArg", lambda **named: tuple(named.items()), create=True),  # since 3.7
        mock.patch.object(nvidia, "compile_module_from_src", lambda **_: made, create=True),
        mock.patch.object(nvidia, "library_dirs", lambda: [], create=True),
        mock.patch.object(torch.Tensor, "data_ptr", lambda tensor: 4096),
    ):
        for each in prepare(meta_call(problem))[0]:
            compiled = compilation.compile_for(each, 90)
            own = nvidia.CudaLauncher(compiled.src, compiled.metadata)
            grid, stream, function = (*each.grid, 1, 1)[:3], 7, 11
            metadata = compiled.packed_metadata
            names = each.kernel.arg_names
            given = dict(zip(names, each.args, strict=False)) | {k: v for k, v in each.keywords().items() if k in names}
            own(*grid, stream, function, metadata, None, None, None, *(given[name] for name in names))
            known = SimpleNamespace(
                run=own, function=function, src=compiled.src, metadata=compiled.metadata, packed_metadata=metadata
            )
            build = launcher.Build(known, each, RELEASES[triton_compat.installed()])
            build.run(each.grid, launcher._key_and_values(each, 0)[1], stream)
            found.append(tuple(list(map(plain, asked)) for asked in fake.launched[-2:]))
    return found


def plain(argument):
    """An argument in a comparable form: tensors as addresses, tuples as lists, other objects as text."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, (list, tuple)):
        return [plain(each) for each in argument]
    return argument if isinstance(argument, (int, float, str, bytes, type(None))) else str(argument)


@pytest.mark.skipif(triton_compat.installed() not in RELEASES, reason="a Triton whose launcher has not been read")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.norm}-{problem.direction}-{problem.cols}")
def test_the_driver_is_given_what_tritons_launcher_gives_it(workers, problem):
    pairs = workers.submit(launches, problem).result()
    assert pairs
    for by_triton, by_us in pairs:
        assert by_us == by_triton and len(by_us) > 10


@pytest.fixture(scope="module")
def workers():
    with worker_processes() as pool:
        yield pool


@pytest.mark.parametrize("release", [(3, 5), (3, 6), (3, 7), (3, 8), (3, 9), (3, 10), None])
def test_only_releases_that_have_run_on_a_gpu_are_launched_without_triton(release, monkeypatch):
    monkeypatch.setattr(triton_compat, "installed", lambda: release)
    assert (triton_compat.in_use() is not None) == (release in ((3, 6), (3, 7), (3, 8), (3, 9)))


def test_with_any_other_release_triton_launches(monkeypatch):
    from fusednorm.host import launcher

    asked = []
    kernel = {(3,): lambda *args, **keywords: asked.append((args, keywords))}
    launch = SimpleNamespace(kernel=kernel, grid=(3,), args=(1, 2), keywords=lambda: {"a": 3})
    monkeypatch.setattr(launcher, "TRITON", None)
    launcher.run(launch, 0)
    assert asked == [((1, 2), {"a": 3})]
    assert launcher.known_build(launch, 0) == (None, [])


@pytest.mark.parametrize("gone", ["global_scratch_size", "launch_pdl", "launch"])
def test_a_launcher_that_is_other_than_known_is_left_to_triton(gone, monkeypatch):
    from fusednorm.host import launcher

    names = ("global_scratch_size", "profile_scratch_size", "launch_pdl", "launch")
    monkeypatch.setattr(launcher, "TRITON", RELEASES[3, 6])
    run = SimpleNamespace(**{name: 0 for name in names if name != gone})
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=(4, 1, 0), metadata=SimpleNamespace())
    launch = SimpleNamespace(
        norm=None, tile=SimpleNamespace(num_warps=4), kernel=SimpleNamespace(arg_names=[]), operands=()
    )
    assert launcher.Build.of(compiled, launch) is None


def end_of_forward(cols: int) -> list[str]:
    """The exits and cluster barriers behind the last store in a forward's PTX; in a process that can compile."""
    from fusednorm.host import launch
    from fusednorm.tools import compilation

    (forward,) = launch.prepare_forward(meta_call(make_problem("layer", cols, direction="forward")))[0]
    lines = [line.strip() for line in compilation.compile_for(forward, 90).asm["ptx"].splitlines()]
    last = max(number for number, line in enumerate(lines) if "st.global" in line)
    return [line for line in lines[last:] if line.startswith(("exit;", "ret;", "barrier.cluster"))]


@pytest.mark.parametrize("cols", [4096, 16384])
def test_a_cta_of_a_forward_ends_without_meeting_the_rest_of_its_cluster(cols, workers):
    assert workers.submit(end_of_forward, cols).result()[0].startswith(("exit;", "ret;"))
