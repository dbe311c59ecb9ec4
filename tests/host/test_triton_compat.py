"""Our launcher, which bypasses Triton's, must give the driver exactly what Triton's launcher gives it.

No GPU is needed: a fake driver records its arguments.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from column_sums import Sums
from head_norms import HeadCase
from planning import make_problem, meta_call

from fusednorm.columns.plan import Choice, choose
from fusednorm.columns.problem import check_column_sum
from fusednorm.heads.problem import Packing
from fusednorm.host import fallback, torch_compat, triton_compat
from fusednorm.host.triton_compat import RELEASES
from fusednorm.operands import operands_of
from fusednorm.planner.device import H200
from fusednorm.planner.norm_problem import NormProblem

ROWS, STREAM = 300, 7
PROBLEMS = [
    make_problem("layer", 4096),  # tensor maps
    make_problem("layer", 16384),  # tensor maps and a cluster
    make_problem("rms", 1001, direction="forward"),  # no tensor map, a float
    (Sums(ROWS, 4096, 3, torch.bfloat16), "ring"),  # a tuple of addresses, and tensor maps behind the constants
    (Sums(ROWS, 1001, 1), "portable"),  # tuples of one element
    HeadCase(cols=64, tokens=9, dtype=torch.bfloat16, rotary=64, table_dims="BS"),  # numbers in tuples
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


def programs(given) -> tuple:
    """(program, its tensors, the shape of x) of a norm's problem or of a column sum, with a kernel's name."""
    from fusednorm.columns import launch as columns
    from fusednorm.host import launch

    if isinstance(given, HeadCase):
        return program_of_heads(given)
    if isinstance(given, NormProblem):
        call = meta_call(given, ROWS, device="cpu")
        return launch.program_of(call, fallback.choose(given, ROWS, H200), H200), call.tensors, call.shape
    sums, kernel = given
    inputs = sums.inputs()
    call = check_column_sum(inputs, sums.total, None)
    return columns.program_of(call, Choice(choose(call.problem, ROWS, H200, kernel).plan, 2)), inputs, inputs[0].shape


def program_of_heads(case: HeadCase) -> tuple:
    """The same of a backward for slices of a packed tensor."""
    from fusednorm.heads import call, launch, plan
    from fusednorm.heads.operands import PACKED

    width = (case.heads + 2 * case.kv_heads) * case.cols
    packing, packed = Packing(case.heads, case.kv_heads), torch.randn(case.batch, case.tokens, width).bfloat16()
    q, k, v = packing.split(packed)
    tables = [each[:, :, None].bfloat16() for each in case.tables()]
    weights = torch.ones(2, case.cols).bfloat16().unbind()
    grads = [each.contiguous() for each in (q, k, v)]
    arguments = grads, packed, weights, (None, None), *tables, 1e-6, [True] * 5, *packing
    given = operands_of(PACKED, arguments, {})
    program = launch.program_of(given, plan.plans_of(call.calls_of(given), H200), H200)
    return program, given.tensors, q.shape


class Compiled(SimpleNamespace):
    """Launches as Triton's compiled kernels do."""

    def __getitem__(self, grid):
        from triton.compiler import CompiledKernel

        return CompiledKernel.__getitem__(self, grid)

    def _init_handles(self) -> None: ...

    def launch_metadata(self, *_) -> None: ...


def launches(given, is_known: bool) -> list[tuple[list, list]]:
    """For each kernel, the driver's arguments from Triton's launcher and from ours, of a release that is known or not;
    in a process that can compile."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver as runtime

    from fusednorm.host import launcher
    from fusednorm.tools import compilation

    fake, hooks = Driver(), (None, None)
    if not is_known:
        hooks = launcher.Build.RUNTIME.launch_enter_hook, launcher.Build.RUNTIME.launch_exit_hook
    made = SimpleNamespace(launch=fake.utils.launch)
    program, tensors, shape = programs(given)
    on = program.on_tensors(tensors, shape, ROWS)
    memory = [each for each in on.outputs if each is not None]  # for both launchers
    if on.parts:
        memory.append(torch.tensor([], dtype=program.workspace.dtype).set_(on.parts[0].untyped_storage()))
    with (
        mock.patch.object(runtime, "_active", fake),
        mock.patch.object(nvidia, "PyKernelArg", lambda **named: tuple(named.items()), create=True),  # since 3.7
        mock.patch.object(nvidia, "compile_module_from_src", lambda **_: made, create=True),
        mock.patch.object(nvidia, "library_dirs", lambda: [], create=True),
        mock.patch.object(torch_compat, "current_device", lambda: 0),
        mock.patch.object(torch_compat, "raw_stream", lambda device: STREAM),
        mock.patch.object(torch_compat, "allocate", lambda *_: memory.pop(0)),
    ):
        builds = []
        for symbolic, each in zip(program.launches, on.launches, strict=True):
            compiled = compilation.compile_for(symbolic, 90)
            own = nvidia.CudaLauncher(compiled.src, compiled.metadata)
            grid, function, metadata = (*each.grid, 1, 1)[:3], 11, compiled.packed_metadata
            names = each.kernel.arg_names
            known = dict(zip(names, each.args, strict=False)) | {k: v for k, v in each.keywords().items() if k in names}
            own(*grid, STREAM, function, metadata, None, *hooks, *map(known.get, names))
            known = Compiled(
                run=own, function=function, src=compiled.src, metadata=compiled.metadata, packed_metadata=metadata
            )
            launch_of = RELEASES[triton_compat.installed()] if is_known else triton_compat.own
            builds.append(launcher.Build(known, launch_of, symbolic))
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        assert replace(program, device=0, builds=builds).bind(tuple(shape), ROWS).launch(addresses) is not None
    by_triton, by_us = fake.launched[: len(builds)], fake.launched[len(builds) :]
    return [tuple(list(map(plain, asked)) for asked in pair) for pair in zip(by_triton, by_us, strict=True)]


def plain(argument):
    """An argument in a comparable form: tensors as addresses, tuples as lists, other objects as text."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, (list, tuple)):
        return [plain(each) for each in argument]
    return argument if isinstance(argument, (int, float, str, bytes, type(None))) else str(argument)


@pytest.mark.skipif(triton_compat.installed() not in RELEASES, reason="a Triton whose launcher has not been read")
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: str(each)[:60])
def test_the_driver_is_given_what_tritons_launcher_gives_it(workers, problem, is_known):
    pairs = workers.submit(launches, problem, is_known).result()
    assert pairs
    for by_triton, by_us in pairs:
        assert by_us == by_triton and len(by_us) > 10


DOCTORED = {  # what a compiled kernel would say if the release passed something else
    "one parameter more": (".param .u32", ".param .u64 more,\n\t.param .u32"),
    "a parameter of another type": (".param .u32", ".param .u64"),
    "more threads": (".reqntid ", ".reqntid 1"),
    "no number of threads": (".reqntid", ".maxntid"),
}


def answers(given) -> tuple[list[bool], list[tuple[bool, int]]]:
    """For the kernels of a call, whether those of a release that is not known may be launched; the same for the first
    kernel as each of DOCTORED, with the number of warnings; in a process that can compile."""
    import warnings

    from fusednorm.host import launcher
    from fusednorm.tools import compilation

    def is_as_expected(launch, old="", new=""):
        compiled = compilation.compile_for(launch, 90)
        launcher._differences.clear()
        known = SimpleNamespace(
            run=SimpleNamespace(global_scratch_size=0, profile_scratch_size=0), function=11, src=compiled.src,
            metadata=compiled.metadata, packed_metadata=compiled.packed_metadata,
            asm={"ptx": compiled.asm["ptx"].replace(old, new, 1) if old else compiled.asm["ptx"]},
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as said, mock.patch.object(launcher, "TRITON", None):
            warnings.simplefilter("always")
            builds = [launcher.Build.of(known, launch) for _ in range(2)]
        return None not in builds, len(said)

    kernels = programs(given)[0].launches
    doctored = [is_as_expected(kernels[0], *each) for each in DOCTORED.values()]
    return [is_as_expected(each)[0] for each in kernels], doctored


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: str(each)[:60])
def test_kernels_of_a_release_that_is_not_known_are_launched_where_they_agree(workers, problem):
    agree, doctored = workers.submit(answers, problem).result()
    assert agree and all(agree)
    assert doctored == [(False, 1)] * len(DOCTORED)


@pytest.mark.parametrize("release", [(3, 5), (3, 6), (3, 7), (3, 8), (3, 9), (3, 10), None])
def test_only_releases_that_have_run_on_a_gpu_are_launched_without_triton(release, monkeypatch):
    monkeypatch.setattr(triton_compat, "installed", lambda: release)
    assert (triton_compat.in_use() is not None) == (release in ((3, 6), (3, 7), (3, 8), (3, 9)))


def test_with_any_other_release_triton_launches_what_it_does_not_describe(monkeypatch):
    from fusednorm.host import launch, launcher

    class Compiled:
        run = None

        def __getitem__(self, grid): ...

    class Kernel:
        params = [SimpleNamespace(do_not_specialize=False, annotation_type="")] * 64
        pre_run_hooks, asked = (), []

        def warmup(self, *args, grid, **keywords):
            return Compiled()

        def __getitem__(self, grid):
            return lambda *args, **keywords: self.asked.append((grid, args, keywords))

    kernel, call = Kernel(), meta_call(make_problem("layer", 1000, direction="forward"), 8, device="cpu")
    program = launch.program_of(call, fallback.choose(call.problem, 8, H200), H200)
    program = replace(program, launches=tuple(replace(each, kernel=kernel) for each in program.launches))
    monkeypatch.setattr(launcher, "TRITON", None)
    monkeypatch.setattr(launcher, "_differences", [])
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    with pytest.warns(RuntimeWarning, match="Triton .* launches kernels itself, 240 to 560 us a call, because"):
        outputs, loaded = launcher.run(program, call.tensors, call.shape, call.rows)
    ((grid, args, keywords),) = kernel.asked
    assert loaded is None and grid == (8,) and keywords["tile"] is program.launches[0].tile
    assert all(a is b for a, b in zip(args, [*call.tensors, *outputs], strict=False))


@pytest.mark.parametrize("gone", ["global_scratch_size", "launch_pdl", "launch"])
def test_a_launcher_that_is_other_than_known_is_left_to_triton(gone, monkeypatch):
    from fusednorm.host import launcher

    names = ("global_scratch_size", "profile_scratch_size", "launch_pdl", "launch")
    monkeypatch.setattr(launcher, "TRITON", RELEASES[3, 6])
    run = SimpleNamespace(**{name: 0 for name in names if name != gone})
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=(4, 1, 0), metadata=SimpleNamespace())
    assert launcher.Build.of(compiled, None) is None


def end_of_forward(cols: int) -> list[str]:
    """The exits and cluster barriers behind the last store in a forward's PTX; in a process that can compile."""
    from fusednorm.host import launch
    from fusednorm.tools import compilation

    (forward,) = launch.on_tensors(meta_call(make_problem("layer", cols, direction="forward")))[0]
    lines = [line.strip() for line in compilation.compile_for(forward, 90).asm["ptx"].splitlines()]
    last = max(number for number, line in enumerate(lines) if "st.global" in line)
    return [line for line in lines[last:] if line.startswith(("exit;", "ret;", "barrier.cluster"))]


@pytest.mark.parametrize("cols", [4096, 16384])
def test_a_cta_of_a_forward_ends_without_meeting_the_rest_of_its_cluster(cols, workers):
    assert workers.submit(end_of_forward, cols).result()[0].startswith(("exit;", "ret;"))
