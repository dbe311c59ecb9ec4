"""warmup: compiles the kernels of expected problems in parallel, before the first call needs them.

This process makes the plans. Worker processes, which use no GPU, compile the kernels into Triton's on-disk cache. Then
this process runs each kernel once on a few rows, which loads it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..dtypes import FLOAT_DTYPES
from ..forms import CHOICES, PLAIN, ROUNDINGS, STEPS, Settings, fields_of, require_one_of
from ..functional import groups_of, op_of_sum
from ..host import fallback, gpus
from ..host.program import Program
from ..host.question import Question
from ..operands import (
    FIRST,
    FOLLOWING,
    FORM_NAMES,
    FORWARD,
    NORMS,
    OPS,
    OWN_OUTPUTS,
    RECORDED,
    WAYS,
    Op,
    Operands,
    Role,
    derivative_of,
    operands_of,
)
from ..planner import choice, limits
from ..planner.device import DeviceSpec
from ..planner.legality import MAX_RING_ROWS
from ..planner.norm_problem import MOST_ROWS_OF_TILE, NormProblem
from ..planner.plan import Plan, ReferencePlan
from ..problem.calls import BackwardCall, ForwardCall, check_backward, check_forward
from ..problem.outputs import settings_of, shape_of
from ..problem.validation import FLOATS
from ..settings.forcing import forced_variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

FEW_TABLE_ROWS = 8  # the bits that a sort looks at depend on them, and no plan does
FEW_SAMPLES = 2
FEW_ROWS = 16  # rows of the calls that are compiled and run here; no build depends on the row count
MANY_ROWS = 1 << 20  # row count for which the substitute of a failed plan is chosen
# Up to this many builds are compiled in this process, because a worker first imports torch and triton, which takes
# longer.
SERIAL_BUILDS = 2

PACKAGE = __package__.removesuffix(".tools")
# Imports the package from its file, under the name that it has here: a build that Hugging Face's `kernels` has loaded
# is not on sys.path.
WORKER = """
import sys
from importlib import import_module, util
_, name, file, *work = sys.argv
spec = util.spec_from_file_location(name, file)
sys.modules[name] = package = util.module_from_spec(spec)
spec.loader.exec_module(package)
import_module(f"{name}.tools.warm").work(*work)
"""


class Wanted(NamedTuple):
    """An expected call of an op, without its tensors. Its rows are contiguous."""

    norm: str
    direction: str
    cols: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    has_bias: bool
    output_mask: tuple[bool, bool, bool]
    residual_dtype: torch.dtype | None = None  # a form's residual's, or that of the gradient added to dx
    form: str = ""  # the suffix of the form's forward op
    settings: tuple[tuple[str, Any], ...] = ()  # of the form, by the names of the op's operands; groups by their size
    sample_rows: int | None = None  # rows of each sample, which share a row of the modulations; None: all rows
    modulation_dtype: torch.dtype | None = None  # None: that of x
    table_rows: int = FEW_TABLE_ROWS  # of modulations that are tables
    samples: int = FEW_SAMPLES  # of sample_rows

    @property
    def op(self) -> Op:
        forward = self._forward_op
        if self.direction == FORWARD:
            return forward
        if self.has_no_op:
            name = forward.name
            raise ValueError(f"{name} has no backward of its own: it takes those of plus_residual and of of_sum")
        suffix = forward.backward or ("_residual" if self.residual_dtype else "")
        return OPS[f"{self.norm}_norm_bwd{suffix}"]

    @property
    def _forward_op(self) -> Op:
        return OPS[op_of_sum(f"{self.norm}_norm_fwd{self.form}", self.dtype, self.residual_dtype or self.dtype)]

    @property
    def has_no_op(self) -> bool:
        """Whether no op is this call: a backward of a form that normalizes again."""
        return self.direction != FORWARD and self._forward_op.form.again

    @property
    def parts(self) -> list[Wanted]:
        """Of a form that normalizes again, calls of one norm each: backwards always are, and forwards without a plan.
        The last one's backward is of h, as that of a sum is of the sum."""
        h, is_forward = ops.fake(self._forward())[0].dtype, self.direction == FORWARD
        last = self._replace(form=FOLLOWING if is_forward else RECORDED, dtype=h, residual_dtype=h)
        return [self._replace(form=FIRST), last][:: 1 if is_forward else -1]

    @property
    def problem(self) -> NormProblem:
        return self.call().problem

    def call(self) -> ForwardCall | BackwardCall:
        """The checked call on a few rows, of tensors without memory; a backward as autograd's node calls it."""
        forward = self._forward()
        if self.direction == FORWARD:
            return check_forward(forward)
        count, by, outputs = len(self.op.outputs), derivative_of(forward.op), ops.fake(forward)
        kept = [*forward.tensors, *outputs[1:]]
        given = {name: kept[at] for name, at in zip(by.saved, by.sources, strict=True)}
        given |= dict(zip(by.grads, outputs[OWN_OUTPUTS:], strict=True))
        given |= settings_of(forward, by)
        if self.residual_dtype and not self.form:
            given["residual_grad"] = self._tensor(Role.ROWS, self.residual_dtype)
        given |= {"grad_out": outputs[0], "normalized_shape": (self.cols,)}
        given["output_mask"] = (*self.output_mask, *[True] * count)[:count]
        return check_backward(operands_of(self.op.name, (), given))

    def _forward(self) -> Operands:
        op, stream = self._forward_op, self.residual_dtype or self.dtype
        given: dict[str, Any] = {"normalized_shape": (self.cols,), "eps": 1e-5} | dict(self.settings)
        if "groups" in given:
            given["groups"] = groups_of(op.name, given["groups"], self.cols)
        bias, modulation = self.weight_dtype if self.has_bias else None, self.modulation_dtype or self.dtype
        dtypes = {"x": self.dtype, "weight": self.weight_dtype, "next_weight": self.weight_dtype}
        dtypes |= dict.fromkeys(("bias", "next_bias"), bias)
        of_role = {Role.ROWS: stream, Role.MODULATION: modulation, Role.TABLE: modulation, Role.INDEX: torch.int64}
        for slot in op.inputs:
            dtype = dtypes.get(slot.name, of_role.get(slot.role, self.dtype))
            if slot.role.is_tensor and dtype:
                given[slot.name] = self._tensor(slot.role, dtype)
        return operands_of(op.name, (), given)

    def _tensor(self, role: Role, dtype: torch.dtype) -> Tensor:
        batch = (self.samples, self.sample_rows) if self.sample_rows else (FEW_ROWS,)
        rows = (self.table_rows,) if role is Role.TABLE else batch
        shape = shape_of(role, (*rows, self.cols), (self.cols,), whole=(True, False)[-len(rows) :])
        return torch.empty(shape, dtype=dtype, device="meta")

    @property
    def of_any_samples(self) -> list[Wanted]:
        """This call and that of many samples, if that has other builds."""
        many = self._replace(samples=limits.piece_of_samples["least"])
        return [self, many] if self.sample_rows and self.direction != FORWARD else [self]

    @property
    def of_few_rows(self) -> Wanted:
        """A call with the same builds that needs less memory."""
        rows = self.sample_rows or 0
        few = self._replace(sample_rows=MOST_ROWS_OF_TILE + rows % MOST_ROWS_OF_TILE)
        return few if rows > 2 * MOST_ROWS_OF_TILE and few.problem == self.problem else self


Launches = list[tuple[Any, Any]]  # each launch behind what makes it again in a process: a Build, or one of qk_norm's


class Build(NamedTuple):
    """One kernel launch of a call by a plan. `index` is its position among the call's launches."""

    wanted: Wanted
    plan: Plan
    index: int

    def launch(self, device: DeviceSpec):
        return program(self.wanted, self.plan, device).launches[self.index]


def warmup(
    norm: str,
    cols: int | Sequence[int],
    dtype: torch.dtype,
    *,
    weight_dtype: torch.dtype | None = None,
    elementwise_affine: bool = True,
    bias: bool | None = None,
    rows: int | Sequence[int] | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    residual_dtype: torch.dtype | None = None,
    form: str = "",
    sample_rows: int | Sequence[int] | None = None,
    modulation_dtype: torch.dtype | None = None,
    table_rows: int | Sequence[int] | None = None,
    directions: Sequence[str] = tuple(WAYS),
    device: torch.device | str | None = None,
    processes: int | None = None,
    **settings: Unpack[Settings],
) -> int:
    """Compile and load the kernels of later calls, so that none of these compiles. Use it before a CUDA-graph capture,
    for example.

    :param norm: "layer" or "rms"
    :param cols: elements of a row, one number or several
    :param dtype: of x and of its gradient
    :param weight_dtype: of weight and bias (None: dtype)
    :param elementwise_affine: False: the norm has no weight and no bias
    :param bias: whether the norm has a bias, if it has a weight (None: as modules do, LayerNorm has one)
    :param rows: expected row counts, one or several (None: any)
    :param output_mask: which gradients will be wanted: (dx, dweight, dbias)
    :param residual_dtype: of a form's residual (None: dtype). Of plain norms, of the residual gradient that the
        backward adds to dx (None: no such gradient)
    :param form: "affine", "of_sum", "times_gate", ..., as the forms' ops are called ("": the plain norm)
    :param sample_rows: of a modulated form, rows that share a row of each modulation, one number or several; 1 if every
        row has its own (None: all rows share one)
    :param modulation_dtype: of a modulated form's scale, shift and gate (None: dtype)
    :param table_rows: of scale, shift and gate of a form "..._by_index", whose index is int64, one number or several
        (None: 8)
    :param directions: of the calls: "forward", "backward" or both
    :param device: a CUDA GPU, or a CPU, for which there is nothing to compile (None: the current GPU if there is one,
        else the CPU)
    :param processes: number of processes that share the work (None: one per CPU)
    :param settings: arguments of the form's function: weight_offset, rounding, normalize_rounded, activation,
        group_size, gate_activation

    Rows are assumed to be contiguous, and aligned to 16 bytes if their size allows it. Honours `force`. Returns the
    number of kernels, 0 for a CPU device.

    Raises ValueError for another norm, direction, form, rounding or activation, and for what the form does not have.
    Raises TypeError for another setting, if cols, rows, sample_rows or table_rows are no integers, and if a dtype is no
    torch.dtype. Raises RuntimeError for dtypes other than float16, bfloat16, float32 and float64, for sizes below 1,
    for a group_size that does not divide cols, for a GPU that is not there, and during the capture of a CUDA graph.
    """
    require_one_of("warmup", "norm", norm, NORMS)
    for each in directions:
        require_one_of("warmup", "directions", each, WAYS)
    of_modulations = {"sample_rows": sample_rows, "modulation_dtype": modulation_dtype, "table_rows": table_rows}
    suffix, of_form = form_named("warmup", form, settings, **of_modulations)
    sizes = {"cols": cols, "rows": rows, "sample_rows": sample_rows, "table_rows": table_rows}
    _check_types(sizes, dtype, weight_dtype, residual_dtype, modulation_dtype)
    device = checked_device("warmup", device)
    of_two = norm == "rms" and not form  # gradients
    mask = (*map(bool, output_mask[: 2 if of_two else 3]), False, False)[:3]
    weight = (weight_dtype or dtype) if elementwise_affine else None
    widths = [cols] if isinstance(cols, int) else cols
    bias = norm == "layer" if bias is None else bias
    expected = dtype, weight, bias and elementwise_affine, mask, residual_dtype, suffix, of_form
    samples = sample_rows if isinstance(sample_rows, Sequence) else [sample_rows]
    tables = table_rows if isinstance(table_rows, Sequence) else [table_rows or FEW_TABLE_ROWS]
    wanted = [
        call
        for width in widths
        for count in samples
        for size in tables
        for each in directions
        for call in Wanted(norm, each, width, *expected, count, modulation_dtype, size).of_any_samples
    ]
    wanted = [part for each in wanted for part in (each.parts if each.has_no_op else [each])]
    if device.type == "cpu":
        for each in wanted:
            each.call()  # raises what is wrong
        return 0
    spec = gpus.spec_of(device)
    plans = list(plans_of(wanted, [rows] if isinstance(rows, int) else rows, spec))
    count = build_ahead(launches_of(plans, spec), spec, processes, device.type == "cuda")
    if device.type == "cuda":
        _load(plans, device, spec)
    return count


def form_named(
    asker: str, form: str, settings: Settings, **of_modulations: Any
) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """(Wanted.form, Wanted.settings). `of_modulations` is what only modulated forms have. Raises TypeError for a
    setting that there is not, and ValueError for another form, rounding or activation and for what the form does not
    have."""
    if form and form not in FORM_NAMES:
        raise ValueError(f"{asker}: form must be one of {', '.join(FORM_NAMES)}, got {form!r}")
    suffix = f"_{form}" if form else ""
    if unknown := settings.keys() - Settings.__annotations__.keys():
        raise TypeError(f"{asker}: got an unexpected keyword argument {min(unknown)!r}")
    fields, has = {}, {slot.name for slot in OPS[f"rms_norm_fwd{suffix}"].inputs}
    for name, value in settings.items():
        if value is None:
            continue
        if name == "rounding":
            require_one_of(asker, name, value, (*ROUNDINGS, STEPS))
        for field, each in fields_of(name, value).items():
            if field in CHOICES:
                require_one_of(asker, name, each, [*filter(None, CHOICES[field])])
            if field in has:
                fields[field] = each
            elif each != getattr(PLAIN, field):
                raise ValueError(f"{asker}: {name}={value!r} must come with a form that has it, got {form!r}")
    for name, value in of_modulations.items():
        if value is not None and "scale" not in has:
            raise ValueError(f"{asker}: {name} must come with a modulated form, got {form!r}")
        if value is not None and (name == "sample_rows" if "row_index" in has else name == "table_rows"):
            other = "out" * ("row_index" in has)
            raise ValueError(f"{asker}: {name} must come with a form with{other} an index, got {form!r}")
    return suffix, tuple(fields.items())


def _check_types(given: dict[str, int | Sequence[int] | None], *dtypes: torch.dtype | None) -> None:
    for name, sizes in ((name, each) for name, each in given.items() if each is not None or name == "cols"):
        many = sizes if isinstance(sizes, Sequence) and not isinstance(sizes, str) else [sizes]
        for size in many:
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"warmup: {name} must be an integer or several, got {size!r}")
            if size < 1:
                raise RuntimeError(f"warmup: {name} must be 1 or more, got {size}")
    for dtype in dtypes:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"warmup: dtypes must be torch.dtypes, got {dtype!r}")
        if dtype is not None and dtype not in FLOAT_DTYPES:
            raise RuntimeError(f"warmup: dtypes must be {FLOATS}, got {dtype}")
    if dtypes[0] is None:
        raise TypeError("warmup: dtype must be a torch.dtype, got None")


def checked_device(asker: str, device: torch.device | str | None) -> torch.device:
    """The device, with the index of a GPU. By default it is the current GPU if there is one, else the CPU. "meta" is
    for tests: kernels are compiled, but not loaded."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(f"{asker}: device must be a CUDA GPU or a CPU, got {device}")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(f"{asker}: device must be a GPU that is there, got {device}, where torch finds none")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{asker}: must run before the capture of a CUDA graph, not during it")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def plans_of(wanted: list[Wanted], rows: Sequence[int] | None, device: DeviceSpec) -> Iterator[tuple[Wanted, Plan]]:
    """Each plan that the planner would choose for one of these row counts, or if rows is None for any row count of a
    ring."""
    for each in wanted:
        problem = each.problem
        if not problem.wants_any:
            continue
        if rows is None and fallback.asked(problem, 1, device) == (problem, problem.form.groups, device):
            ends = (most for most, _ in choice.choices(problem, device, forced_variant()))
            questions = [Question(problem, min(most, MAX_RING_ROWS), device) for most in ends]
        else:
            questions = [fallback.asked(problem, count, device) for count in rows or (1,) if count]
        plans = [choice.choose(*each, forced_variant()) for each in questions]
        for plan in dict.fromkeys(plans):
            if not isinstance(plan, ReferencePlan):
                yield each, plan
            elif problem.form.again:
                yield from plans_of(each.parts, rows, device)


def build_ahead(launches: Launches, device: DeviceSpec, processes: int | None, loads: bool = False) -> int:
    """Build the kernels of launches in parallel. Returns the number of kernels. If the installed Triton compiles in an
    unknown way, nothing is built here, and the kernels are compiled one by one when they are loaded. A caller that
    `loads` them replaces a plan whose kernel does not compile; else this raises."""
    try:
        builds = distinct(launches, device)
        compile_builds(builds, device, processes)
    except ImportError:
        return len(launches)
    except Exception as error:
        if not loads or fallback.cause_of(error, launched=False) is None:
            raise
        return len(launches)
    return len(builds)


def launches_of(plans: Iterable[tuple[Wanted, Plan]], device: DeviceSpec) -> Launches:
    return [
        (Build(wanted, plan, index), launch)
        for wanted, plan in plans
        for index, launch in enumerate(program(wanted, plan, device).launches)
    ]


def distinct_builds(plans: Iterable[tuple[Wanted, Plan]], device: DeviceSpec) -> list[Build]:
    """One entry per kernel to be built. Calls that share a build have one entry together."""
    return distinct(launches_of(plans, device), device)


def distinct(launches: Launches, device: DeviceSpec) -> list:
    from . import compilation

    builds: dict[str, Any] = {}
    for build, launch in launches:
        builds.setdefault(compilation.build_key(launch, device.arch), build)
    return list(builds.values())


def compile_builds(builds: list, device: DeviceSpec, processes: int | None) -> None:
    """Build the kernels that are not in Triton's on-disk cache. Raises RuntimeError, or the compiler's own error if the
    build runs in this process."""
    wait_for(start_workers(builds, device, processes))


def start_workers(builds: list, device: DeviceSpec, processes: int | None) -> list[subprocess.Popen]:
    """Processes that do so; none if there is so little to build that it is built here."""
    from . import compilation

    builds = [each for each in builds if not compilation.is_built(each.launch(device), device.arch)]
    count = min(processes or os.cpu_count() or 1, len(builds))
    if count <= 1 or len(builds) <= SERIAL_BUILDS:
        _compile(builds, device)
        return []
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return [start_process("_compile", builds[start::count], device, **streams) for start in range(count)]


def wait_for(workers: list[subprocess.Popen]) -> None:
    """Raises RuntimeError if a kernel does not compile."""
    said = [worker.communicate()[1].decode(errors="replace").strip() for worker in workers]
    failures = [text for worker, text in zip(workers, said, strict=True) if worker.returncode]
    if failures:
        last_line = (failures[0].splitlines() or ["its process was killed"])[-1]
        raise RuntimeError(f"warmup: a kernel does not compile: {last_line}")


def start_process(function: str, *arguments: object, **streams: int) -> subprocess.Popen:
    """Start a process that calls a function of this file. Unlike one of multiprocessing it imports nothing of the
    caller's program. It never uses Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", WORKER, PACKAGE, sys.modules[PACKAGE].__file__, function]
    with tempfile.TemporaryFile() as file:  # a pipe takes no more than 64 KiB before the process reads
        pickle.dump(arguments, file)
        file.seek(0)
        return subprocess.Popen(command, stdin=file, env=environment, **streams)


def work(function: str) -> None:
    """In such a process."""
    globals()[function](*pickle.load(sys.stdin.buffer))


def _compile(builds: list, device: DeviceSpec) -> None:
    from . import compilation

    for build in builds:
        compilation.compile_for(build.launch(device), device.arch)


def compile_in_order(tasks: list[tuple[Wanted, tuple[Plan, ...]]], device: DeviceSpec) -> None:
    """Writes a line for each task as soon as the kernels of its plans are built. One that does not compile is told by
    who needs it."""
    from . import compilation

    for wanted, plans in tasks:
        for plan in plans:
            with contextlib.suppress(Exception):
                for launch in program(wanted, plan, device).launches:
                    compilation.compile_for(launch, device.arch)
        print(flush=True)


def _load(plans: list[tuple[Wanted, Plan]], device: torch.device, spec: DeviceSpec) -> None:
    """Run each program once: Triton finds the builds on disk, loads them and keeps them. A plan that cannot be built is
    replaced here, as in a first call."""
    from ..host import launcher

    with torch.cuda.device(device):
        for wanted, plan in ((each.of_few_rows, plan) for each, plan in plans):
            call = wanted.call()
            while not isinstance(plan, ReferencePlan):
                try:
                    launcher.run(program(wanted, plan, spec), _zeros(call, device), call.shape, call.rows)
                    break
                except fallback.BuildFailed as failed:
                    fallback.remember(plan, call.problem, spec, str(failed))
                    plan = fallback.choose(call.problem, MANY_ROWS, spec).plan
        torch.cuda.synchronize()


def _zeros(call: ForwardCall | BackwardCall, device: torch.device) -> list[Tensor | None]:
    """Memory for the call's tensors, whose shapes no kernel asks for."""
    dtypes = [None if each is None else each.dtype for each in call.tensors]
    return [dtype and torch.zeros(call.shape, dtype=dtype, device=device) for dtype in dtypes]


def program(wanted: Wanted, plan: Plan, device: DeviceSpec) -> Program:
    from ..host import launch

    return launch.program_of(wanted.call(), fallback.Choice(plan), device)
