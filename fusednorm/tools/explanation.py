"""explain: which variant runs, with which resources, and why no other, for a live tensor or for a problem on any
GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import DTYPE_NAMES
from ..forms import Settings, require_one_of
from ..host import fallback, gpus
from ..host.derived import derived_of
from ..host.kernel_devices import runs_kernels
from ..operands import DIRECTIONS, NORMS, OPS, ForwardOperands
from ..planner import budget, choice, table
from ..planner.candidates import are_better_in_registers
from ..planner.device import DeviceSpec
from ..planner.legality import MAX_RING_ROWS, broken_rule
from ..planner.model import bytes_moved, predict_us
from ..planner.norm_problem import ALIGNMENT, NormProblem
from ..planner.plan import VARIANTS, Plan, ReferencePlan, grid_of, num_launches, num_passes
from ..problem.calls import many_rows
from ..problem.rows import is_tma_aligned, row_view
from ..problem.validation import validate
from ..settings import invariance
from ..settings.forcing import forced_variant
from .warm import Wanted, form_named

if TYPE_CHECKING:
    from typing_extensions import Unpack

SORTED = " behind those that sort the rows by their numbers"


@dataclass(frozen=True)
class Decision:
    """A plan, and for each variant a sentence: why it is chosen or why it is not."""

    plan: Plan
    forced: bool  # `force` asked for the plan's variant
    reasons: dict[str, str]  # by variant


class Cost(NamedTuple):
    """Bytes of device memory that are read and written. share_of_light is the time to move the tensors once at the
    datasheet's bandwidth, divided by predicted_us."""

    bytes_moved: int
    predicted_us: float
    share_of_light: float


@dataclass(frozen=True)
class Explanation:
    """The planner's decision with its reasons. str() is for people, as_dict() for programs. device is None if no kernel
    of this package can run."""

    problem: NormProblem
    rows: int
    device: DeviceSpec | None
    decision: Decision
    notes: tuple[str, ...] = ()  # about the tensors, such as copies that their strides require
    sample_rows: int = 0  # rows of a sample that has CTAs of its own; 0: all rows are one sample

    @property
    def plan(self) -> Plan:
        return self.decision.plan

    @property
    def cost(self) -> Cost | None:
        if not self.device or not self.rows or isinstance(self.plan, ReferencePlan):
            return None
        call = self.plan, self.problem, self.rows * self.problem.form.groups, self.device
        coefficients, (read, written) = table.coefficients(self.device), self.problem.row_bytes
        time = predict_us(*call, coefficients)
        light = self.rows * self.problem.width * (read + written) / self.device.bandwidth_gb_s / 1e3
        return Cost(bytes_moved(*call), time, light / time)

    def __str__(self) -> str:
        problem, plan, reasons = self.problem, self.plan, self.decision.reasons
        dtypes = ", ".join(
            f"{name} {DTYPE_NAMES[dtype]}"
            for name, dtype in (("x", problem.x_dtype), ("weight", problem.weight_dtype), ("bias", problem.bias_dtype))
            if dtype is not None
        )
        where = f" on {self.device.name}" if self.device else ""
        groups = f"{problem.form.groups} groups of " if problem.form.groups > 1 else ""
        shape = f"{_count(self.rows, 'row')} of {groups}{_count(problem.cols, 'column')}"
        form = ", ".join(f"{name} {value}" for name, value in problem.form.changed.items())
        lines = [
            f"{problem.norm}_norm {problem.direction}{where}: {shape}, {dtypes}{form and f'; form: {form}'}",
            f"  {plan.variant}: {reasons[plan.variant]}",
            *(f"  {text}" for text in [*self._resources(), *self.notes]),
            *(f"  not {' or '.join(variants)}: {reason}" for reason, variants in self._refused().items()),
        ]
        return "\n".join(lines)

    def _refused(self) -> dict[str, list[str]]:
        """{reason: variants} for the variants that do not run. A reason that the chosen one's names is left out."""
        reasons, refused = self.decision.reasons, {}
        for variant in VARIANTS:
            if reasons[variant] not in reasons[self.plan.variant]:
                refused.setdefault(reasons[variant], []).append(variant)
        return refused

    def _resources(self) -> list[str]:
        plan, problem, device, lines = self.plan, self.problem, self.device, []
        if not isinstance(plan, ReferencePlan):
            limit = derived_of(plan, problem, device).get("register_limit") or plan.max_registers
            registers = min(limit, budget.registers(plan, problem, device))
            inputs = "x and dy" if problem.direction == "backward" else "x"
            lines = [
                str(plan),
                self._grid(),
                f"launches: {num_launches(plan, problem)}{SORTED * problem.by_key}; "
                f"passes over {inputs}: {num_passes(plan, problem)}",
                f"shared memory {budget.shared_bytes(plan, problem)} of {device.smem_per_block_bytes} bytes a CTA, "
                f"registers up to {registers} of {limit} a thread",
                *self._derived(),
            ]
        if self.cost:
            moved, time, share = self.cost
            lines.append(f"{moved / 1e6:.1f} MB moved, {time:.1f} us predicted: {share:.0%} of the speed of light")
        return lines

    def _from_plan(self) -> dict[str, Any]:
        many_samples = 0 < many_rows(self.sample_rows, self.problem) <= self.rows
        return derived_of(self.plan, self.problem, self.device, many_samples)

    def _derived(self) -> list[str]:
        """What follows from the plan of a backward, as text."""
        found, said = self._from_plan(), []
        if "prefetches_statistics" in found and not self.problem.is_forward:
            pairs = ", bfloat16 widened in pairs" * found["widens_in_pairs"]
            once = ", tiles read once" * found["reads_once"]
            said = [f"statistics loaded {'a' if found['prefetches_statistics'] else 'half a'} tile ahead{pairs}{once}"]
        if sums := found.get("sums"):
            start = "before the first has ended" if sums["dependent"] else "when the first has ended"
            of_cta = f"{sums['cols']} columns for each CTA of {_count(sums['num_warps'], 'warp')}"
            said.append(f"sums by the second launch, which may begin {start}: {of_cta}")
        return said

    def _grid(self) -> str:
        plan, problem, device = self.plan, self.problem, self.device
        rule = grid_of(plan, problem, device, self.sample_rows)
        count = rule.ctas(self.rows)
        clusters = plan.cluster > 1
        grid = f"{_count(count, 'cluster')} of {plan.cluster} CTAs" if clusters else _count(count, "CTA")
        if plan.by_columns:
            grid += f" for each of {-(-problem.cols // plan.chunk)} column tiles"
        if problem.form.groups > 1:
            grid += f" for each of {problem.form.groups} groups"
        if problem.by_key:
            grid += ", some of them for the rows of each number"
        if self.sample_rows:
            grid += f" for each of {_count(rule.samples(self.rows), 'sample')}"
        left = f"; sm_margin leaves {device.sm_margin} to others" if device.sm_margin else ""
        return f"{grid}, up to {_count(plan.ctas_per_sm, 'CTA')} on each of {device.sm_count} SMs{left}"

    def as_dict(self) -> dict:
        problem, plan, estimate = self.problem, self.plan, self.cost
        kernel = not isinstance(plan, ReferencePlan)
        return {
            "variant": plan.variant,
            "forced": self.decision.forced,
            "reasons": self.decision.reasons,
            "rows": self.rows,
            "cols": problem.cols,
            "norm": problem.norm,
            "pass": problem.direction,
            "form": problem.form._asdict(),
            "dtype": DTYPE_NAMES[problem.x_dtype],
            "weight_dtype": DTYPE_NAMES.get(problem.weight_dtype),
            "device": self.device.name if self.device else None,
            "sm_margin": self.device.sm_margin if self.device else 0,
            "plan": {"type": type(plan).__name__, **dataclasses.asdict(plan)},
            "passes": num_passes(plan, problem) if kernel else None,
            "launches": num_launches(plan, problem) if kernel else None,
            "shared_bytes": budget.shared_bytes(plan, problem) if kernel else None,
            "registers": budget.registers(plan, problem, self.device) if kernel else None,
            "derived": self._from_plan() if kernel else {},
            "bytes_moved": estimate.bytes_moved if estimate else None,
            "predicted_us": round(estimate.predicted_us, 2) if estimate else None,
            "share_of_light": round(estimate.share_of_light, 4) if estimate else None,
            "notes": list(self.notes),
        }


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def decide(problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None) -> Decision:
    """What the planner chooses, and why. It looks on: the planner itself writes no sentences."""
    chosen, unforced = choice.decide(problem, device, forced), choice.choose(problem, rows, device)
    plan, obeyed = choice.at(chosen.ranges, rows), chosen.source == "forced"
    reasons = {variant: _why_not(variant, plan, problem, rows, device) for variant in VARIANTS}
    reasons[plan.variant] = f"chosen: {_why(chosen.source, problem, rows, device)}"
    if forced:
        broken, other = reasons[forced], unforced.variant
        if not obeyed:
            reasons[forced] = f"forced, but it {broken}"
        elif forced == other:
            reasons[forced] = "forced, and would be chosen anyway"
        else:
            fault = ""
            if forced != "reference" and not choice.best_plan(forced, problem, device):
                slow = are_better_in_registers(problem, device)
                fault = ", though threads load such rows sooner" if slow else ", though it might spill"
            reasons[forced] = f"forced{fault}; {other} would be chosen"
            reasons[other] = f"would be chosen: {_why(choice.decide(problem, device).source, problem, rows, device)}"
    return Decision(plan, obeyed, reasons)


def _why(source: str, problem: NormProblem, rows: int, device: DeviceSpec) -> str:
    if source == "legality":
        return "the kernels of two norms run" if problem.form.again else "no kernel of this package runs here"
    if rows > MAX_RING_ROWS:
        return f"the only kernel for more than {MAX_RING_ROWS} rows"
    told = {
        "published": "by the rules that nvFuser has published for B200",
        "model": "predicted to be the fastest; nothing like it was measured here",
    }
    unusable = table.of_user(device.name)
    return told.get(source, source) + (f"; your table is not used: {unusable}" if isinstance(unusable, str) else "")


def _why_not(variant: str, chosen: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> str:
    broken = broken_rule(variant, problem, rows, device)
    if broken:
        return broken.reason
    if variant == "reference":
        return f"could run, but {chosen.variant} comes first"
    if choice.best_plan(variant, problem, device) is None:
        slow = variant == "pipelined" and are_better_in_registers(problem, device)
        return "copies rows by 16 bytes, which threads load sooner" if slow else choice.no_room(problem, device)
    if variant not in choice.variants_in_use(device):
        return f"could run, but is not in use on {device.name}"
    return f"could run, but {chosen.variant} comes first"


def explain_problem(
    problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None, sample_rows: int = 0
) -> Explanation:
    decision = decide(problem, rows * problem.form.groups, device, forced)
    return Explanation(problem, rows, device, decision, sample_rows=sample_rows)


def samples_of(asker: str, sample_rows: int | None, rows: int) -> int | None:
    """Wanted.sample_rows. Raises ValueError if they do not divide the rows."""
    if sample_rows is not None and (sample_rows < 1 or rows % sample_rows):
        raise ValueError(f"{asker}: sample_rows must divide the {rows} rows, got {sample_rows}")
    return None if sample_rows == rows else sample_rows


def explain(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: str = "layer",
    direction: str = "backward",
    grad_out: Tensor | None = None,
    form: str = "",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    sample_rows: int | None = None,
    modulation_dtype: torch.dtype | None = None,
    device: DeviceSpec | None = None,
    **settings: Unpack[Settings],
) -> Explanation:
    """Explain which kernel runs for a norm of x, `[*batch, *normalized_shape]`, and why. print() the result.

    norm is "layer" or "rms", direction "forward" or "backward". The backward computes the gradients of all inputs
    given, from a gradient laid out as grad_out, by default contiguous and of x's dtype. form is that of an op,
    "affine", "of_sum", "times_gate", ..., with its residual or gate (by default contiguous and of x's dtype) and with
    settings: arguments of its function, such as weight_offset, rounding or group_size. In a backward of a sum, x is the
    sum, and if it is wider than grad_out, the summand has grad_out's dtype. sample_rows rows share a row of each
    modulation (None: all rows do, 1: no two), which has modulation_dtype (None: x's). `device`, such as
    fusednorm.planner.device.H200, replaces x's own. The result takes `force` into account, and kernels that have failed
    in this process. Copies nothing and launches nothing. Raises RuntimeError or TypeError where the op would, TypeError
    for another setting, and ValueError for another norm, direction, form, rounding or activation, for what the form
    does not have, and for sample_rows that do not divide the rows.
    """
    require_one_of("explain", "norm", norm, NORMS)
    require_one_of("explain", "direction", direction, DIRECTIONS)
    of_modulations = {"sample_rows": sample_rows, "modulation_dtype": modulation_dtype}
    suffix, of_form = form_named("explain", form, settings, **of_modulations)
    batch_shape = validate(ForwardOperands(norm, x, normalized_shape, weight, bias), "explain")
    rows, width, backward = math.prod(batch_shape), math.prod(normalized_shape), direction == "backward"
    beside = {"residual": residual, "gate": gate}  # one of these, if the form has it
    stream = next((each.dtype for each in beside.values() if each is not None), x.dtype)
    of_modulations["sample_rows"] = samples_of("explain", sample_rows, rows)
    dtype = x.dtype
    if backward and suffix and OPS[f"{norm}_norm_fwd{suffix}"].form.rows_out and grad_out is not None:
        stream, dtype = x.dtype, min(x.dtype, grad_out.dtype, key=lambda each: each.itemsize)
    has_bias, mask = bias is not None, (backward, False, False)
    wanted = Wanted(norm, direction, width, dtype, getattr(weight, "dtype", None), has_bias, mask)
    if form:
        wanted = wanted._replace(residual_dtype=stream, form=suffix, settings=of_form, **of_modulations)
    call = wanted.call()
    expected = call.problem
    cols = expected.cols
    layouts = [_layout("x", x, len(batch_shape), cols)]
    if backward:
        given = grad_out is not None
        layouts.append(_layout("grad_out", grad_out, len(batch_shape), cols) if given else _contiguous(x, cols))
    for name, each in beside.items():
        if each is not None and name in expected.names_in:
            layouts.append(_layout(name, each, len(batch_shape), cols))
    problem = dataclasses.replace(
        expected,
        x_dtype=x.dtype,
        weight_dtype=None if weight is None else weight.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        grad_dtype=(x if grad_out is None else grad_out).dtype if backward else None,
        wants_dw=backward and weight is not None,
        wants_db=backward and bias is not None,
        nested_rows=expected.nested_rows or any(layout.nested for layout in layouts),
        tma_aligned=all(layout.aligned for layout in layouts),
    )
    notes = tuple(layout.note for layout in layouts if layout.note)
    if device is None and not runs_kernels(x):
        return _by_reference(problem, rows, f"x is on {x.device}, where ATen's kernels run", notes)
    if rows == 0 or cols == 0:
        return _by_reference(problem, rows, "x has no elements", notes)
    spec = gpus.less_margin(device) if device else gpus.spec_of(x.device)
    of_block, in_force = rows, invariance.switch.invariance()
    if 0 < in_force < rows and problem.num_sums:
        of_block = in_force
        notes += (f"runs for {-(-rows // of_block)} blocks of up to {of_block} rows in turn: ordered_sums",)
    question = fallback.asked(problem, of_block, spec)
    decision = _in_place_of(decide(*question, forced_variant()), problem, rows, spec)
    return Explanation(problem, rows, spec, decision, notes, call.sample_rows)


def _in_place_of(decision: Decision, problem: NormProblem, rows: int, device: DeviceSpec) -> Decision:
    """The decision; if its plan has failed, one for the substitute, whose reasons name the failures."""
    if not fallback.has_failed(decision.plan, problem, device):
        return decision
    plan, reasons = fallback.substitute(problem, rows, device), dict(decision.reasons)
    for failed, cause in fallback.failed_of(problem, device).items():
        reasons[failed.variant] = f"cannot run here: {cause}"
    if plan.variant != decision.plan.variant:
        reasons[plan.variant] = f"chosen: {decision.plan.variant} has failed"
    return Decision(plan, False, reasons)


class _Layout(NamedTuple):
    nested: bool
    aligned: bool
    note: str = ""


def _layout(name: str, tensor: Tensor, batch_ndim: int, cols: int) -> _Layout:
    """How the op would read a tensor's rows."""
    if invariance.switch.invariance() and (not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT):
        why = "rows are batch-invariant, and it is not contiguous and aligned to 16 bytes"
        return _contiguous(tensor, cols)._replace(note=f"{name} is copied first: {why}")
    view = row_view(tensor, batch_ndim)
    if view is None:
        why = f"with strides {tuple(tensor.stride())} its rows are at more than two strides, or their elements apart"
        return _contiguous(tensor, cols)._replace(note=f"{name} is copied first: {why}")
    return _Layout(view.inner_rows != 1, is_tma_aligned(view, cols))


def _contiguous(tensor: Tensor, cols: int) -> _Layout:
    """The layout of a fresh contiguous tensor, which starts at a multiple of 16 bytes."""
    return _Layout(False, cols * tensor.element_size() % ALIGNMENT == 0)


def _by_reference(problem: NormProblem, rows: int, why: str, notes: tuple[str, ...]) -> Explanation:
    reasons = dict.fromkeys(VARIANTS, why) | {"reference": f"chosen: {why}"}
    return Explanation(problem, rows, None, Decision(ReferencePlan(why), False, reasons), notes)
