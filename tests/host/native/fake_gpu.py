"""A fake H200 for the C++ host side, which launches on CPU tensors here.

The host side launches through a fake CUDA driver. The driver reads the parameters of a launch as the compiled kernel
declares them. Then torch code computes, in float64, the results that the kernel would write to the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from cases import BF16, FP16, FP32, FP64
from fusednorm.kernels import rowmath
from fusednorm.kernels.config import Form, Tile

from fusednorm import operands, ops, reference
from fusednorm.forms import CHOICES
from fusednorm.host import key, launcher, native, prepared, program, triton_compat
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.operands import operands_of
from fusednorm.planner.device import H200
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.settings import invariance, margin
from fusednorm.tools import compilation

STREAM = 1  # the native handle that the C++ side gets for the stream of CPU tensors (Program::run in program.h)


ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS


CUDA_HEADER = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


MAP_DTYPES = {6: FP16, 7: FP32, 8: FP64, 9: BF16}  # by CUtensorMapDataType


POINTED_TO = {"fp16": FP16, "bf16": BF16, "fp32": FP32, "fp64": FP64, "i32": torch.int32, "i64": torch.int64}


DRIVER = r"""
#include <cuda.h>
#include <string.h>

typedef struct {
  uint64_t address, sizes[5], strides[4];
  uint32_t type, rank, box[5];
} Map;

typedef int (*Launch)(const uint64_t *config, void **parameters);

static Launch launch;
static __thread CUcontext context;
int contexts;

void on_launch(Launch does) { launch = does; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  uint64_t numbers[] = {(uint64_t)function, (uint64_t)config->hStream, config->gridDimX, config->gridDimY,
                        config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
                        config->sharedMemBytes, 1, 1, 1, 0, 0};
  if (!context || extra) return CUDA_ERROR_INVALID_CONTEXT;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute *each = &config->attrs[i];
    if (each->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      numbers[9] = each->value.clusterDim.x;
      numbers[10] = each->value.clusterDim.y;
      numbers[11] = each->value.clusterDim.z;
    } else if (each->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE) {
      numbers[12] = each->value.clusterSchedulingPolicyPreference;
    } else if (each->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      numbers[13] = each->value.programmaticStreamSerializationAllowed;
    } else {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return launch(numbers, parameters);
}

/* Takes what Triton's driver gives, for strided memory without swizzling. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  Map known = {(uint64_t)address};
  if ((uint64_t)map % 64 || (uint64_t)address % 16 || rank < 2 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_NONE ||
      promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_128B || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return CUDA_ERROR_INVALID_VALUE;
  known.type = type;
  known.rank = rank;
  for (unsigned i = 0; i < rank; ++i) {
    if (element_strides[i] != 1 || (i && strides[i - 1] % 16)) return CUDA_ERROR_INVALID_VALUE;
    known.sizes[i] = sizes[i];
    known.box[i] = box[i];
    if (i) known.strides[i - 1] = strides[i - 1];
  }
  memset(map, 0, sizeof *map);
  memcpy(map, &known, sizeof known);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : 0;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetCurrent(CUcontext *current) {
  *current = context;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *primary, CUdevice device) {
  ++contexts;
  *primary = (CUcontext)(uint64_t)(device + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given) {
  context = given;
  return CUDA_SUCCESS;
}
"""


LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_void_p))


class Map(ctypes.Structure):
    """A tensor map as DRIVER encodes it: innermost dimension first; strides in bytes, without the innermost."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("type", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
    ]

    def shape(self) -> list[int]:
        return list(self.sizes[: self.rank])[::-1]

    def byte_strides(self) -> list[int]:
        return list(self.strides[: self.rank - 1])[::-1]

    def known(self) -> tuple:
        """The map in the form of `encoded`."""
        return "map", self.address, self.type, self.shape(), self.byte_strides(), list(self.box[: self.rank])[::-1]

    @classmethod
    def of(cls, address: int, type: int, shape: list[int], byte_strides: list[int], box: list[int]) -> Map:
        known = cls(address=address, type=type, rank=len(shape))
        for name, values in (("sizes", shape), ("strides", byte_strides), ("box", box)):
            getattr(known, name)[: len(values)] = values[::-1]
        return known

    def rows(self, groups: int = 1) -> torch.Tensor:
        """The memory as [rows, cols]. The map's dimensions are [rows, cols], [rows, boxes, box] or
        [chunks, rows, boxes, box]; groups are a dimension behind the rows."""
        dtype, behind = MAP_DTYPES[self.type], groups > 1
        strides = [each // dtype.itemsize for each in self.byte_strides()]
        tensor = at_address(self.address, dtype, self.shape(), [*strides, 1])
        return (tensor.movedim(0, 1 + behind) if self.rank == 4 + behind else tensor).flatten(1)


# The C type of a kernel's parameter, by its declaration in PTX.
PARAMETERS = {"u32": ctypes.c_int32, "u64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double, "b8": Map}


def at_address(address: int, dtype: torch.dtype, shape, strides=None) -> torch.Tensor:
    """A tensor over the memory at an address. Strides count elements; without strides it is contiguous."""
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class Build(launcher.Build):
    """A kernel compiled for an H200. What Python launches is computed, too, without a record in `Gpu.launched`."""

    def __init__(self, compiled, launch):
        super().__init__(compiled, triton_compat.RELEASES[3, 6], launch)
        self.name, self.norm = launch.kernel.__name__, launch.norm
        self.groups = launch.tile.groups if isinstance(launch.tile, Tile) else 1
        self.squares = self.norm is not None and self.norm.form.finish_dw is not None  # it is a norm of squared.py
        self.shares = launch.operands[2] if self.name == "finalize_samples" else ()
        self.tile = launch.tile
        self.launch = self._compute
        self._kinds: list = []  # of the arguments, those of tensor maps expanded
        for given, kind in zip(launch.arguments(), compiled.src.signature.values(), strict=True):
            self._kinds += [kind] * (1 + 2 * len(given.shape) if isinstance(given, program.Map) else 1)
        types = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", compiled.ptx.split(".entry")[1].split(")")[0])
        self.declared = list(zip(self._parameter_names(), types, strict=True))

    def _parameter_names(self) -> list[str]:
        names = []
        for name, kind in self.compiled.src.signature.items():
            if str(kind).startswith("tensordesc"):
                rank = kind.split("]")[0].count(",") + 1
                names += [name, *(f"{name}.{what}{i}" for what in ("shape", "stride") for i in range(rank))]
            elif isinstance(kind, tuple):
                names += [f"{name}.{at}" for at, each in enumerate(kind) if each != "constexpr"]
            elif kind != "constexpr":
                names.append(name)
        return [*names, "global_scratch", "profile_scratch"]

    def _compute(self, *arguments) -> None:
        given = list(left_in_build(arguments[4 + len(self.head) :], self._kinds))
        given = [Map.of(*value[1:]) if isinstance(value, tuple) else value for value in given]
        names = [name for name, _ in self.declared]
        with torch.no_grad():
            compute(Launched(self, None, dict(zip(names, given, strict=False)), arguments[:3]))

    @property
    def encoders(self):
        return [functools.partial(encoded, each) for each in self.descriptors]

    def values(self, launch) -> list:
        """The parameters of a launch on tensors."""
        encoders = iter(self.encoders)
        return [self._value(given, encoders) for given, _ in self.parameters(launch)]

    @staticmethod
    def _value(given, encoders):
        if isinstance(given, program.Map):
            return next(encoders)(given.tensor.data_ptr(), list(given.shape), list(given.strides))
        return given.data_ptr() if isinstance(given, torch.Tensor) else given


def left_in_build(arguments, kinds):
    for given, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from left_in_build(given, kind)
        elif kind != "constexpr":
            yield given


def encoded(descriptor: dict, pointer: int, shape: list[int], strides: list[int]) -> tuple:
    """A tensor map in the form of `Map.known`."""
    element_bytes, cuda_type = descriptor["elem_size"], triton_compat.number_of_type(descriptor["elem_type"])
    byte_strides = [element_bytes * stride for stride in strides[:-1]]
    return "map", pointer, cuda_type, shape, byte_strides, descriptor["block_size"]


class Config(NamedTuple):
    """The configuration of a launch: everything but its parameters."""

    function: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int]
    policy: int  # of scheduling clusters; 0 without clusters
    dependent: int  # 1 if it may begin before the launch before it has ended


class Launched(NamedTuple):
    """A launch that reached the driver, or that Python handed over."""

    build: Build
    config: Config | None  # None: it came from Python
    parameters: dict[str, object]  # by the kernel's names
    grid: tuple[int, int, int]

    def tensor(self, name: str, shape, strides=None) -> torch.Tensor | None:
        """The memory at the parameter `{name}_ptr`, or None if the kernel lacks this parameter."""
        address = self.parameters.get(f"{name}_ptr")
        if address is None:
            return None
        return at_address(address, POINTED_TO[self.build.compiled.src.signature[f"{name}_ptr"][1:]], shape, strides)

    def more_rows(self, name: str, at: int = 0) -> torch.Tensor | None:
        """One tensor of `rows_in`, `rows_out`, `added` or `shared`, whose rows belong to samples."""
        (rows, cols), parameters = self.shape(), self.parameters
        of_form = self.build.norm.rows_in
        nth = {"rows_in": range(len(of_form)), "added": [len(of_form)]}.get(name, ())[at:][:1]
        if nth and f"desc_{nth[0] + 1}" in parameters:  # through the ring
            return parameters[f"desc_{nth[0] + 1}"].rows(self.build.groups)
        if f"{name}.{at}" not in parameters:
            return None
        if self.is_table(name, at):
            rows = parameters["table_rows"]
        elif name == "shared":
            rows //= self.sample_rows()
        strides_of, inner, strides = {"rows_in": "strides_in", "shared": "strides_shared"}, 1, (cols, 0)
        if name in strides_of:  # Triton leaves out numbers of 1
            inner, *strides = (parameters.get(f"{strides_of[name]}.{3 * at + which}", 1) for which in range(3))
        shape = rows // inner, inner, cols
        return at_address(parameters[f"{name}.{at}"], self.pointed_to(name, at), shape, (*strides, 1)).flatten(0, 1)

    @property
    def is_by_key(self) -> bool:
        """Whether rows of one number are a sample, in an order."""
        return "order_ptr" in self.parameters

    def is_table(self, name: str, at: int) -> bool:
        return self.is_by_key if name == "shared" else name == "rows_in" and self.build.norm.is_table(at)

    def by_row(self, name: str, at: int) -> torch.Tensor:
        """A tensor of `rows_in` or `shared`, with a row for each row of x."""
        found = self.more_rows(name, at)
        if self.is_table(name, at):
            return found[self.numbers()]
        return found.repeat_interleave(self.sample_rows(), 0) if name == "shared" else found

    def numbers(self) -> torch.Tensor:
        """Of the rows of x, those of their rows of tables."""
        shape = (self.shape()[0],)
        if not self.is_by_key:
            return self.tensor("row_index", shape).long()
        order = self.tensor("order", shape).long()
        return torch.empty_like(order).scatter_(0, order, self.tensor("key", shape).long())

    def sums_of_keys(self, at: int) -> torch.Tensor:
        """The first rows of the partials of a table's gradient, as many as the table has."""
        shape = self.parameters["table_rows"], self.shape()[1]
        return at_address(self.parameters[f"sum_partials.{at}"], self.pointed_to("sum_partials", at), shape)

    def pointed_to(self, name: str, at: int) -> torch.dtype:
        return POINTED_TO[self.build.compiled.src.signature[name][at][1:]]

    def sample_rows(self) -> int:
        return self.parameters.get("sample_rows", self.shape()[0])

    def partials(self, name: str, at: int | None = None) -> torch.Tensor | None:
        """Of the partials at a parameter, the first row of each sample."""
        rows, cols = self.shape()
        samples, ctas = rows // self.sample_rows(), self.grid["sample_rows" in self.parameters]
        shape, strides = (samples, cols), (ctas * cols, 1)
        if at is None:
            return self.tensor(name, shape, strides)
        return at_address(self.parameters[f"{name}.{at}"], self.pointed_to(name, at), shape, strides)

    def rows(self, name: str) -> torch.Tensor | None:
        parameters = self.parameters
        if f"{name}_desc" in parameters:
            return parameters[f"{name}_desc"].rows(self.build.groups)
        if f"{name}_ptr" not in parameters:
            return None
        (rows, cols), inner = self.shape(), parameters[f"{name}_inner"]
        strides = parameters[f"{name}_outer_stride"], parameters[f"{name}_inner_stride"], 1
        return self.tensor(name, (rows // inner, inner, cols), strides).flatten(0, 1)

    def shape(self) -> tuple[int, int]:
        return self.parameters["rows"], self.parameters["cols"] * self.build.groups

    def statistic(self, name: str) -> torch.Tensor | None:
        """[rows, groups, 1]"""
        shape, stride = (self.shape()[0], self.build.groups, 1), self.parameters.get(f"{name}_stride", 1)
        return self.tensor(name, shape, (self.build.groups * stride, stride, 1))

    def given(self) -> dict[str, torch.Tensor]:
        """What is read but statistics, by the names of operands, as [rows, groups, columns of a group]."""
        norm, shape = self.build.norm, self.shape()
        found = {"x": self.rows("x"), "grad_out": self.rows("dy"), "residual_grad": self.more_rows("added")}
        for rows, names in (("rows_in", norm.rows_in), ("shared", norm.shared)):
            found |= {name: self.by_row(rows, at) for at, name in enumerate(names)}
        weight, bias = (self.tensor(name, shape[1:]) for name in ("weight", "bias"))
        weight = weight.double().square() if self.build.squares and weight is not None else weight
        parameters = {"weight": weight, "bias": bias}
        parameters |= {name: self.tensor(name, shape[1:]) for name in norm.parameters}
        found |= {name: each.expand(shape) for name, each in parameters.items() if each is not None}
        return {name: each.unflatten(-1, (self.build.groups, -1)) for name, each in found.items() if each is not None}


def compute(launched: Launched) -> None:
    """Writes the results that the kernel would write. Partial sums are all in the first row of partials, or in that of
    their sample."""
    name, cols = launched.build.name, launched.parameters.get("cols")  # a finalizer has those of all groups
    if name == "finalize":
        for each in ("dw", "db"):
            total = launched.tensor(f"{each}_partial", (cols,))
            if launched.build.squares and each == "dw" and total is not None:
                total = 2 * total * launched.tensor("weight", (cols,))
            fill(launched.tensor(each, (cols,)), total)
    elif name == "finalize_samples":
        sum_samples(launched)
    elif name == "add_blocks":
        add_blocks(launched)
    elif name == "sort_by_digit":
        sort_by_digit(launched)
    elif name == "sum_keys":
        sum_keys(launched)
    elif name.startswith("forward"):
        compute_forward(launched)
    elif name not in ("backward_row_means", "count_digits"):
        compute_backward(launched)


def compute_forward(launched: Launched) -> None:
    shape, total = launched.shape(), launched.more_rows("rows_out")
    y = launched.tensor("y", shape)
    more = {"eps": launched.parameters["eps"], "y_dtype": y.dtype, "residual_dtype": total is not None and total.dtype}
    made = reference.formula_of_group(operands_in(launched, "forward", launched.given(), more))
    mean, rstd, *again = map(launched.statistic, ("mean", "rstd", "next_mean", "next_rstd"))
    outputs = y, mean, rstd, total, *[each for each in again if each is not None]
    for out, each in zip(outputs, made, strict=False):
        fill(out, each if each is None or each.shape[-1] == 1 else each.flatten(1))


def sum_samples(launched: Launched) -> None:
    parameters, samples = launched.parameters, launched.grid[0]
    cols, count = parameters["cols"], parameters["num_partials"]
    for at, share in enumerate(launched.build.shares):
        partials, dtype = parameters[f"partial_ptrs.{at}"], launched.pointed_to("partial_ptrs", at)
        of_sum = at_address(partials, dtype, (samples, cols), (count * cols, 1))
        rows = samples // share if share else 1
        out = at_address(parameters[f"out_ptrs.{at}"], launched.pointed_to("out_ptrs", at), (rows, cols))
        fill(out, of_sum.unflatten(0, (rows, -1)).sum(1))


def add_blocks(launched: Launched) -> None:
    parameters, cols = launched.parameters, launched.parameters["cols"]
    for at in range(launched.grid[1]):
        blocks, out = (
            at_address(parameters[f"{name}.{at}"], launched.pointed_to(name, at), shape, strides)
            for name, shape, strides in (
                ("sum_ptrs", (parameters["num_blocks"], cols), (parameters["stride"], 1)),
                ("out_ptrs", (cols,), (1,)),
            )
        )
        total = blocks[0].clone()
        for each in blocks[1:]:
            total += each
        fill(out, total)


def sort_by_digit(launched: Launched) -> None:
    tile, size, rows = launched.build.tile, launched.parameters["size"], (launched.parameters["rows"],)
    keys, before = launched.tensor("key", rows).clamp(-1, size), launched.tensor("order", rows)
    order = (keys + 1 >> tile.shift & tile.digits - 1).argsort(stable=True)
    fill(launched.tensor("sorted_key", rows), keys[order])
    fill(launched.tensor("sorted_order", rows), order if before is None else before[order])


def sum_keys(launched: Launched) -> None:
    shape = launched.grid[0], launched.parameters["cols"]
    for at in range(launched.grid[2]):
        partials, out = (
            at_address(launched.parameters[f"{name}.{at}"], launched.pointed_to(name, at), shape)
            for name in ("partial_ptrs", "out_ptrs")
        )
        fill(out, partials)


def compute_backward(launched: Launched) -> None:
    """The gradients of parameters and of what samples share are computed for each row, and then added up."""
    norm, (rows, cols) = launched.build.norm, launched.shape()
    given = {name: each.double() for name, each in launched.given().items()}
    dy = given["grad_out"]
    unread = torch.zeros_like(dy)  # kernels get no operand that the wanted gradients do not depend on
    given = {"x": unread, "bias": unread, "weight": unread + 1.0 - norm.form.weight_offset} | given
    statistics = {name: launched.statistic(name) for name in ("mean", "rstd")}
    given |= {name: each.double() for name, each in statistics.items() if each is not None}
    operands = operands_in(launched, "backward", given, {"dx_dtype": FP64, "dsummand_dtype": FP64, "shift": dy})
    made = [each if each is None else each.flatten(1) for each in reference.backward_formula(operands)]
    dx, dw, db = made[:3]
    grads = dx, *made[3:]
    if norm.stores_dx:
        fill(launched.tensor("dx", (rows, cols)), dx)
    for at, which in enumerate(norm.stored[norm.stores_dx :] if norm.wants_dx else ()):
        fill(launched.more_rows("rows_out", at), grads[which])
    of_samples = [(launched.partials(f"{name}_partial"), each) for name, each in (("dw", dw), ("db", db))]
    for at, which in enumerate(norm.summed):
        if launched.is_by_key:
            launched.sums_of_keys(at).zero_().index_add_(0, launched.numbers(), grads[which].float())
        else:
            of_samples.append((launched.partials("sum_partials", at), grads[which]))
    for out, each in of_samples:
        if out is not None:
            fill(out, each.unflatten(0, (-1, launched.sample_rows())).sum(1))
    for name, each in (("dw", dw), ("db", db)):
        if each is not None:
            fill(launched.tensor(name, (cols,)), each.sum(0))


def operands_in(launched: Launched, direction: str, given: dict, more: dict):
    """The operands of an op that computes what the launch does, with groups as rows of their own."""
    form, norm = launched.build.norm.form, "layer" if launched.build.norm.layer else "rms"
    form = rowmath.AFFINE if launched.build.squares else form
    op, settings = op_of(direction, norm, form, frozenset(given))
    return operands_of(op, (), {"normalized_shape": (launched.parameters["cols"],)} | given | settings | more)


@functools.cache
def op_of(direction: str, norm: str, form: Form, names: frozenset[str]) -> tuple[str, dict]:
    """The name of an op that has these operands, and the settings by which its form is this one."""

    def values(slot: operands.Slot) -> list:
        if isinstance(slot.default, float):
            return [getattr(form, slot.name)]
        if isinstance(slot.default, bool):
            return [slot.default, not slot.default]
        return [*filter(None, CHOICES.get(slot.name, [slot.default]))]

    for op in operands.OPS.values():
        if (op.norm, op.direction) == (norm, direction) and names <= {slot.name for slot in op.inputs} and op.form:
            of_op = {slot.name: values(slot) for slot in op.inputs if slot.role is operands.Role.FORM}
            for chosen in itertools.product(*of_op.values()):
                settings = dict(zip(of_op, chosen, strict=True))
                if rowmath.form_of(op.form._replace(**settings)) == form:
                    return op.name, settings
    raise LookupError(f"no op of {names} has the form {form}")


def fill(tensor: torch.Tensor | None, values: torch.Tensor) -> None:
    if tensor is not None:
        tensor.copy_(values)


class Gpu:
    """The fake GPU of a test: its launches, and the calls that went to the Python host side."""

    def __init__(self, driver: ctypes.CDLL):
        self.launched: list[Launched] = []
        self.python_calls: list[tuple] = []
        self.remembers = True  # whether calls that go to Python leave programs for later ones
        self.computes = True  # whether launches from C++ write results
        self.result = 0  # the driver's error code for each launch; 0 is success
        self.failure: Exception | None = None
        self.driver, self._launch = driver, LAUNCH(self._take)
        driver.on_launch(self._launch)

    def contexts(self) -> int:
        """How many threads have been given a CUDA context."""
        return ctypes.c_int.in_dll(self.driver, "contexts").value

    def _take(self, config, pointers) -> int:
        if self.result:
            return self.result
        try:
            function, stream, *numbers = config[:14]
            shaped = tuple(numbers[:3]), tuple(numbers[3:6]), numbers[6], tuple(numbers[7:10]), *numbers[10:12]
            build = BUILDS_BY_FUNCTION[function]
            found = {
                name: PARAMETERS[kind].from_address(pointers[at]) for at, (name, kind) in enumerate(build.declared)
            }
            values = {name: Map.from_buffer_copy(v) if isinstance(v, Map) else v.value for name, v in found.items()}
            launched = Launched(build, Config(function, stream, *shaped), values, shaped[0])
            self.launched.append(launched)
            if self.computes:
                with torch.no_grad():
                    compute(launched)
        except Exception as failure:  # an exception cannot pass through C: keep it for the fixture
            self.failure = failure
            return ILLEGAL_ADDRESS
        return 0

    @contextlib.contextmanager
    def repeating(self, calls: int = 1):
        """Inside, exactly `calls` calls must run in C++, and none may go to Python."""
        before, asked = native.repeats(), len(self.python_calls)
        yield
        assert (native.repeats() - before, self.python_calls[asked:]) == (calls, [])

    @contextlib.contextmanager
    def going_to_python(self, *wanted: str):
        """Inside, no call may run in C++; the calls that go to Python must be `wanted` ("forward", ...)."""
        before, asked = native.repeats(), len(self.python_calls)
        yield
        assert (native.repeats() - before, self.directions()[asked:]) == (0, list(wanted))

    def directions(self) -> list[str]:
        return [call[0] for call in self.python_calls]


BUILDS: dict[tuple, Build] = {}
BUILDS_BY_FUNCTION: dict[int, Build] = {}
GPU: Gpu | None = None  # of the test that runs; the fixture `gpu` sets it
BUILDING = threading.Lock()


def load(launches, device) -> list[Build]:
    """In place of launcher.load: compiles kernels for an H200."""
    return [build_of(each) for each in launches]


def build_of(launch) -> Build:
    key = launcher.build_key(launch, -1)
    with BUILDING:
        if key not in BUILDS:
            function = 2**40 + len(BUILDS)
            BUILDS[key] = BUILDS_BY_FUNCTION[function] = build_for(launch, function)
    return BUILDS[key]


def build_for(launch, function: int) -> Build:
    compiled = compilation.compile_for(launch, H200.arch)
    metadata = compiled.metadata
    assert not (metadata.global_scratch_size or metadata.profile_scratch_size)
    run = SimpleNamespace(launch_pdl=metadata.launch_pdl, launch=in_tritons_form(None))
    known = SimpleNamespace(
        run=run, function=function, src=compiled.src, metadata=metadata, ptx=compiled.asm["ptx"],
        packed_metadata=compiled.packed_metadata,
    )  # fmt: skip
    return Build(known, launch)


def in_tritons_form(launcher):
    """`launcher` in the closure of a function, where Build looks for the driver's launch function."""
    return lambda *arguments: launcher(*arguments)


def look(operands, first=None):
    """In place of prepared.run: finds no program, so that Python repeats no call."""
    return (None, None) if first is None else first(operands, miss_of(operands))


def miss_of(operands) -> prepared.Miss | None:
    try:
        in_force = invariance.switch.invariance()
        return prepared.Miss(*key.look(operands, in_force), margin.sms, in_force)
    except (RuntimeError, TypeError, AttributeError):
        return None


def launched(operands):
    """In place of ops.launched, which would send CPU tensors to ATen."""
    forward = operands.direction == "forward"
    if operands.norm != "head":
        problem = (check_forward if forward else check_backward)(operands).problem
        mask = () if forward else ((problem.wants_dx, problem.wants_dw, problem.wants_db),)
        GPU.python_calls.append((problem.direction, operands.norm, *mask))
    with kernels_on("cpu"):
        return ops.first(operands, miss_of(operands) if GPU.remembers else None)
