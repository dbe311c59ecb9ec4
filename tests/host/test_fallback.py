"""If the kernels of a plan cannot be built, the next plan runs, and in the end ATen. The numbers stay right, each cause
warns once, and failures are remembered. A fake Triton stands in for the compiler and the driver; it runs the portable
kernels in the interpreter."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from eager import aten_looks_like_cuda, override
from planning import make_problem
from torch.testing import assert_close

import fusednorm
from fusednorm import force
from fusednorm.columns import plan as column_plan
from fusednorm.host import fallback
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner import choice, table
from fusednorm.planner.device import A100, B200, H200
from fusednorm.tools.doctor import check_fallbacks

pytest.importorskip("triton")
from fusednorm.kernels import finalizer, multiwave  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.experimental.gluon._runtime import GluonJITFunction  # noqa: E402
from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

from fusednorm.columns import launch as launch_columns  # noqa: E402
from fusednorm.host import (
    gpus,
    launcher,  # noqa: E402
)

OPS = torch.ops.fusednorm
COMPILES, LOADS, LAUNCHES = "compile", "load", "launch"
STAGES = {  # failures after which another plan is tried: (the call that fails, its error)
    "compile": (COMPILES, lambda: CompilationError("def kernel():\n  tl.oops()", None, "unknown name oops")),
    "lower": (COMPILES, lambda: RuntimeError("PassManager::run failed")),
    "C compiler": (COMPILES, lambda: RuntimeError("Failed to find C compiler. Please specify via CC")),
    "assemble": (COMPILES, lambda: PTXASError("`ptxas` failed with error code 255:\nptxas fatal: Unresolved extern")),
    "shared memory": (LOADS, lambda: OutOfResources(262144, 232448, "shared memory")),
    "registers": (LOADS, lambda: OutOfResources(1024, 896, "threads")),
    "load": (LOADS, lambda: RuntimeError("Triton Error [CUDA]: device kernel image is invalid")),
    "architecture": (LOADS, lambda: RuntimeError("Triton Error [CUDA]: no kernel image is available for execution")),
    "launch": (LAUNCHES, lambda: RuntimeError("Triton Error [CUDA]: too many resources requested for launch")),
    "cluster": (LAUNCHES, lambda: RuntimeError("Triton Error [CUDA]: cluster misconfiguration")),
}
FOR_THE_USER = {  # failures that no other plan would avoid: the error reaches the user
    "memory to load": (LOADS, lambda: RuntimeError("Triton Error [CUDA]: out of memory")),
    "memory of the host": (COMPILES, MemoryError),
    "memory of tensors": (LOADS, lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    "address at load": (LOADS, lambda: RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")),
    "assertion": (LOADS, lambda: RuntimeError("CUDA error: device-side assert triggered")),
    "address": (LAUNCHES, lambda: RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")),
    "failure": (LAUNCHES, lambda: RuntimeError("Triton Error [CUDA]: unspecified launch failure")),
    "bug": (LAUNCHES, lambda: RuntimeError("Triton Error [CUDA]: invalid argument")),
    "interrupt while compiling": (COMPILES, KeyboardInterrupt),
    "interrupt while loading": (LOADS, KeyboardInterrupt),
    "interrupt": (LAUNCHES, KeyboardInterrupt),
}


class FakeTriton:
    """Kernels with Triton's stages: compile, load, launch.

    `fails` is the stage that fails and its error: for all kernels, or only for rings if `of_rings_alone`. The portable
    kernels compute, in the interpreter.
    """

    def __init__(self, monkeypatch):
        self.fails: tuple[str, type] | None = None
        self.of_rings_alone = False
        self.log: list[tuple[str, str]] = []
        kernels: dict[int, Kernel] = {}
        make = launcher.Launch.__init__

        def make_ours(made, kernel, *args, **more):
            ours = kernel if isinstance(kernel, Kernel) else kernels.setdefault(id(kernel), Kernel(self, kernel))
            make(made, ours, *args, **more)

        monkeypatch.setattr(launcher.Launch, "__init__", make_ours)
        monkeypatch.setattr(launcher, "JITFunction", Kernel)
        monkeypatch.setattr(launcher.Build, "of", staticmethod(lambda compiled, launch: None))
        monkeypatch.setattr(launcher, "_builds", {})
        monkeypatch.setattr(launcher, "_failed", {})
        monkeypatch.setattr(launcher, "_unspecialized", {})  # its keys are ids, which Python may use again

    def do(self, stage: str, kernel: Kernel) -> None:
        self.log.append((stage, kernel.__name__))
        if self.fails and self.fails[0] == stage and (kernel.is_ring or not self.of_rings_alone):
            raise self.fails[1]()

    def stages(self) -> list[str]:
        return [stage for stage, _ in self.log]


class Kernel:
    """Stands in for a JITFunction."""

    pre_run_hooks = ()
    # A build depends on the value of every number, as no parameter is marked do_not_specialize.
    params = [SimpleNamespace(do_not_specialize=False, annotation_type="", name="")] * 64

    def __init__(self, triton: FakeTriton, interpreted):
        self.triton, self.interpreted, self.__name__ = triton, interpreted, interpreted.__name__
        self.arg_names = interpreted.arg_names
        self.is_ring = isinstance(interpreted, GluonJITFunction)  # Gluon, which the interpreter cannot run

    def warmup(self, *args, grid, **keywords):
        self.triton.do(COMPILES, self)
        return Compiled(self)

    def __getitem__(self, grid):
        def run(*args, **keywords):
            self.triton.do(LAUNCHES, self)
            assert not self.is_ring
            return self.interpreted[grid](*args, **keywords)

        return run


class Compiled:
    """What a Kernel is compiled to, with a launcher of no known form."""

    run = None

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        self.kernel.triton.do(LOADS, self.kernel)


@pytest.fixture
def triton(monkeypatch):
    fallback.forget()
    with kernels_on("cpu"):
        yield FakeTriton(monkeypatch)
    fallback.forget()


@pytest.fixture
def on_h200(monkeypatch):
    """Plans are for an H200, by rings wherever its table knows one. Its kernels order dependent launches by PTX, which
    the interpreter lacks: patched out."""

    def of_rings(line: str) -> str:
        cols, plans, *_ = json.loads(line)
        rings = [text for _, text in plans if text.startswith("Pipelined")]
        return json.dumps([cols, [[None, (rings or [plans[-1][1]])[0]]]])

    def with_rings(known: table.Table) -> table.Table:
        return replace(known, lines={key: {cols: of_rings(at[cols]) for cols in at} for key, at in known.lines.items()})

    tables = tuple(map(with_rings, table.shipped()))
    monkeypatch.setattr(table, "shipped", lambda: tables)
    choice.choices.cache_clear()
    monkeypatch.setattr(gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(multiwave, "launch_dependents", lambda: None)
    monkeypatch.setattr(finalizer, "wait_for_prerequisites", lambda: None)
    yield
    choice.choices.cache_clear()


def operands(norm="layer", rows=20, cols=40):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, cols), "weight": (cols,), "bias": (cols,) if norm == "layer" else None}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items() if shape}


def step(norm, tensors):
    """(y, gradients) by our module's function."""
    function = fusednorm.functional.layer_norm if norm == "layer" else fusednorm.functional.rms_norm
    x, *parameters = tensors.values()
    y = function(x, (x.shape[-1],), *parameters)
    return y.detach(), *torch.autograd.grad(y.square().sum(), list(tensors.values()))


def right_step(norm, tensors):
    function = F.layer_norm if norm == "layer" else F.rms_norm
    x, *parameters = tensors.values()
    y = function(x, (x.shape[-1],), *parameters)
    return y.detach(), *torch.autograd.grad(y.square().sum(), list(tensors.values()))


def warned(run):
    """What `run` returns, and the sentences that it warned with."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(each.message) for each in caught if "fusednorm" in str(each.message)]


norms = pytest.mark.parametrize("norm", ["layer", "rms"])


@norms
def test_kernels_that_can_be_built_are_loaded_before_the_first_launch(norm, triton):
    tensors = operands(norm)
    got, said = warned(lambda: step(norm, tensors))
    assert_close(got, right_step(norm, tensors))
    assert not said and not fallback.failures()
    # The forward has one kernel, the backward two.
    assert triton.stages() == [COMPILES, LOADS, LAUNCHES, *[COMPILES, LOADS] * 2, LAUNCHES, LAUNCHES]
    triton.log.clear()
    assert_close(step(norm, tensors), got)
    assert triton.stages() == [LAUNCHES] * 3


@norms
@pytest.mark.parametrize("stage", STAGES)
def test_whatever_stage_fails_aten_runs_where_nothing_else_is_left(norm, stage, triton):
    tensors = operands(norm)
    triton.fails = STAGES[stage]
    got, said = warned(lambda: step(norm, tensors))
    assert_close(got, right_step(norm, tensors))
    assert len(said) == 1  # both directions failed, but for one cause
    error = STAGES[stage][1]()
    assert str(error).splitlines()[0][:40] in said[0] and type(error).__name__ in said[0]
    assert f"{norm}_norm forward of 40 columns of float32 cannot run as multi_wave on A100: " in said[0]
    before = len(triton.log)
    again, said = warned(lambda: step(norm, tensors))
    assert_close(again, got)
    assert not said and len(triton.log) == before  # remembered


@norms
@pytest.mark.parametrize("stage", ["compile", "shared memory", "launch"])
def test_a_ring_that_fails_gives_way_to_multi_wave(norm, stage, triton, on_h200):
    x, *parameters = (each.detach() for each in operands(norm, 16, 512).values())

    def explanation():
        return fusednorm.explain(x, (512,), *parameters, norm=norm)

    assert explanation().plan.variant == "pipelined"
    triton.fails, triton.of_rings_alone = STAGES[stage], True
    got, said = warned(lambda: our_backward(norm, x, parameters))
    assert_close(got, stock_backward(norm, x, parameters), rtol=1e-4, atol=1e-4)
    assert len(said) == 1 and "cannot run as pipelined on H200" in said[0]
    assert {failure.plan.variant for failure in fallback.failures()} == {"pipelined"}
    assert explanation().plan.variant == "multi_wave"
    assert "not pipelined: cannot run here: " in str(explanation())
    assert "multi_wave: chosen: pipelined has failed" in str(explanation())
    findings = check_fallbacks()
    assert [finding.status for finding in findings] == ["note"]
    assert "cannot run as pipelined on H200" in findings[0].text


FORMS = {  # functions of x, the form's other rows and the weight: ours and written out
    "residual": ("of_sum", fusednorm.add_rms_norm, lambda x, r, w: (F.rms_norm(x + r, w.shape, w), x + r)),
    "gate": ("times_gate", fusednorm.rms_norm_gated, lambda x, z, w: (F.rms_norm(x, w.shape, w) * F.silu(z),)),
}


@pytest.mark.parametrize("of_rings_alone, variant", [(True, "multi_wave"), (False, "reference")])
@pytest.mark.parametrize("other", FORMS)
def test_a_form_falls_back_as_a_plain_norm_does_and_explain_says_so(other, of_rings_alone, variant, triton, on_h200):
    form, ours, written = FORMS[other]
    rows = {"x": torch.randn(16, 512), other: torch.randn(16, 512)}
    given = [each.requires_grad_() for each in (*rows.values(), torch.randn(512))]

    def step(run):
        outputs = run(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *torch.autograd.grad(sum(each.square().sum() for each in outputs), given)

    def explanations():
        more = {"norm": "rms", "form": form, other: rows[other]}
        return [
            fusednorm.explain(rows["x"], (512,), given[-1], **more, direction=each) for each in ("forward", "backward")
        ]

    chosen = [each.plan.variant for each in explanations()]
    assert "pipelined" in chosen
    triton.fails, triton.of_rings_alone = STAGES["assemble"], of_rings_alone
    got, said = warned(lambda: step(ours))
    assert_close(got, step(written), rtol=1e-4, atol=1e-4)
    assert len(said) == 1 and "of 512 columns of float32 cannot run as" in said[0] and "PTXASError" in said[0]
    for before, each in zip(chosen, explanations(), strict=True):
        assert each.plan.variant == variant
        told = f"{variant}: chosen: {before} has failed", "cannot run here: PTXASError"
        assert before == variant or all(text in str(each) for text in told)
    tried = len(triton.log)
    again, said = warned(lambda: step(ours))
    assert_close(again, got)
    assert not said and triton.stages()[tried:].count(COMPILES) == 0


def our_backward(norm, x, parameters):
    mean, dims = (x.mean(-1) if norm == "layer" else torch.zeros(len(x))), (x.shape[-1],)
    rstd = torch.rsqrt((x - mean[:, None]).square().mean(-1) + 1e-5)
    if norm == "layer":
        return OPS.layer_norm_bwd(torch.ones_like(x), x, dims, mean, rstd, *parameters)
    return OPS.rms_norm_bwd(torch.ones_like(x), x, dims, rstd, *parameters)


def stock_backward(norm, x, parameters):
    leaves = [each.detach().requires_grad_() for each in (x, *parameters)]
    with torch.enable_grad():
        function = F.layer_norm if norm == "layer" else F.rms_norm
        y = function(leaves[0], (x.shape[-1],), *leaves[1:], eps=1e-5)
        return torch.autograd.grad(y.sum(), leaves)


@norms
@pytest.mark.parametrize("stage", FOR_THE_USER)
def test_what_no_other_kernel_could_mend_reaches_the_user(norm, stage, triton):
    tensors = operands(norm)
    triton.fails = FOR_THE_USER[stage]
    error = FOR_THE_USER[stage][1]
    with pytest.raises(type(error())) as raised:
        step(norm, tensors)
    assert str(raised.value) == str(error())
    assert not fallback.failures()
    triton.fails = None
    assert_close(step(norm, tensors), right_step(norm, tensors))  # nothing is remembered


def test_allocations_that_fail_are_the_users(triton, monkeypatch):
    def allocate(*args, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    tensors = operands()
    monkeypatch.setattr(torch, "empty", allocate)
    with pytest.raises(torch.OutOfMemoryError):
        step("layer", tensors)
    assert not fallback.failures()


def test_a_build_that_failed_is_not_tried_again_for_another_row_count(triton, monkeypatch):
    monkeypatch.setattr(Kernel, "params", [SimpleNamespace(do_not_specialize=True, annotation_type="", name="")] * 64)
    triton.fails = STAGES["assemble"]
    x = torch.randn(20_000, 40)
    warned(lambda: fusednorm.functional.rms_norm(x, (40,)))
    tried = len(triton.log)
    fallback.forget()  # forgets the problem that failed, but not the build
    warned(lambda: fusednorm.functional.rms_norm(x[:19_000], (40,)))
    assert len(triton.log) == tried > 0


def test_each_cause_warns_once_and_another_cause_again(triton):
    triton.fails = STAGES["assemble"]
    _, first = warned(lambda: [fusednorm.functional.rms_norm(torch.randn(20_000, cols), (cols,)) for cols in (8, 40)])
    triton.fails = STAGES["shared memory"]
    _, second = warned(lambda: fusednorm.functional.rms_norm(torch.randn(20_000, 16), (16,)))
    assert len(first) == len(second) == 1
    assert "PTXASError" in first[0] and "OutOfResources: out of resource: shared memory, Required: 262144" in second[0]
    assert {each.problem.cols for each in fallback.failures()} == {8, 40, 16}


def test_a_forced_plan_that_fails_gives_way_too(triton, on_h200):
    triton.fails, triton.of_rings_alone = STAGES["load"], True
    x = torch.randn(16, 512)
    with force("pipelined"):
        got, said = warned(lambda: fusednorm.functional.layer_norm(x, (512,)))
    assert_close(got, F.layer_norm(x, (512,)), rtol=1e-5, atol=1e-5)
    assert len(said) == 1


@pytest.mark.parametrize("device", [A100, H200, B200])
def test_alternatives_end_with_multi_wave_and_aten(device):
    for problem in (make_problem(), make_problem("rms", 1000), make_problem(direction="forward")):
        variants = [plan.variant for plan in fallback.alternatives(problem, 4096, device)]
        assert variants[-2:] == ["multi_wave", "reference"]
        assert variants[0] == choice.choose(problem, 4096, device).variant


@norms
def test_under_the_eager_override_aten_itself_runs_in_the_end(norm, triton):
    triton.fails = STAGES["compile"]
    tensors = operands(norm)
    want = right_step(norm, tensors)
    with aten_looks_like_cuda(), override() as calls:
        got, said = warned(lambda: right_step(norm, tensors))
        taken = len(calls.taken)
        again, _ = warned(lambda: right_step(norm, tensors))
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_close(again, want, rtol=1e-5, atol=1e-5)
    assert len(said) == 1
    assert len(calls.taken) == taken  # the second call does not try our kernels


def test_column_sums_fall_back_to_the_portable_kernel_and_to_aten(triton, on_h200, monkeypatch):
    failing = {launch_columns.RingSum}

    def do(stage, kernel):
        if stage == LOADS and (kernel.is_ring or launch_columns.PortableSum in failing):
            raise STAGES["shared memory"][1]()

    monkeypatch.setattr(triton, "do", do)
    # At this small size the portable kernel would win: prefer the ring.
    monkeypatch.setattr(column_plan, "predicted_us", lambda plan, *_: isinstance(plan, column_plan.PortableSum))
    column_plan.choose.cache_clear()
    inputs = [torch.randn(64, 512) for _ in range(2)]
    want = [each.double().sum(0).float() for each in inputs]
    assert fusednorm.explain_column_sum(inputs).choice.plan.kernel == "ring"
    got, said = warned(lambda: fusednorm.column_sum(inputs))
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(said) == 1 and "column_sum of 512 columns of float32 cannot run as ring on H200" in said[0]
    assert fusednorm.explain_column_sum(inputs).choice.plan.kernel == "portable"
    assert "not by TMA: it cannot run here" in str(fusednorm.explain_column_sum(inputs))
    failing.add(launch_columns.PortableSum)
    launcher._builds.clear()
    got, _ = warned(lambda: fusednorm.column_sum(inputs))
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert fusednorm.explain_column_sum(inputs).choice.plan.kernel == "reference"
    assert warned(lambda: fusednorm.column_sum(inputs))[1] == []
    column_plan.choose.cache_clear()


def test_column_sums_are_not_begun_where_their_second_kernel_cannot_be_built(triton, on_h200, monkeypatch):
    events = []

    def do(stage, kernel):
        events.append(stage)
        if stage == LOADS and events.count(LOADS) % 2 == 0:
            raise STAGES["shared memory"][1]()

    monkeypatch.setattr(triton, "do", do)
    inputs = [torch.randn(20000, 64)]
    assert fusednorm.explain_column_sum(inputs).choice.num_splits > 1
    got, said = warned(lambda: fusednorm.column_sum(inputs))
    assert_close(got, [inputs[0].double().sum(0).float()], rtol=1e-3, atol=1e-3)
    assert said and set(events) == {COMPILES, LOADS}


@pytest.mark.parametrize("error", ["an illegal memory access was encountered", "invalid argument"])
def test_column_sums_leave_the_users_errors_alone(error, triton):
    triton.fails = LAUNCHES, lambda: RuntimeError(f"Triton Error [CUDA]: {error}")
    with pytest.raises(RuntimeError, match=error):
        fusednorm.column_sum([torch.randn(64, 16)])
    assert not fallback.failures()


def test_a_failure_is_of_one_problem_on_one_device():
    problem = make_problem("layer", 4096)
    plan = choice.choose(problem, 16384, H200)
    with pytest.warns(RuntimeWarning, match="cannot run as pipelined"):
        fallback.remember(plan, problem, H200, "no")
    assert fallback.has_failed(plan, problem, H200)
    assert not fallback.has_failed(plan, problem, B200)
    assert not fallback.has_failed(plan, make_problem("layer", 4096, weight="fp32"), H200)
    fallback.forget()
