"""NormProblem: everything that a plan may know about a call, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..dtypes import accumulation_dtype, bytes_of, is_float32_sum
from ..forms import MODULATIONS, PLAIN, FormSpec

ALIGNMENT = 16  # bytes: TMA demands it of addresses and strides, and Triton has separate builds for such pointers
MOST_ROWS_OF_TILE = 64


@dataclass(frozen=True)
class NormProblem:
    """All that a plan may depend on of a call: not the number of rows. The dtype of an absent tensor is None."""

    norm: str  # "layer" or "rms"
    direction: str  # "forward" or "backward"
    cols: int  # of a group, if the form has groups of columns
    x_dtype: torch.dtype
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None  # dtype of a gradient that is added to dx
    wants_dx: bool = False  # or another gradient that takes a second pass over a row tile
    wants_dw: bool = False
    wants_db: bool = False
    nested_rows: bool = False  # the rows of some tensor lie at two nested strides, not at one
    tma_aligned: bool = True  # every row of every tensor that TMA would touch starts at a multiple of 16 bytes
    form: FormSpec = PLAIN  # rules ask what it does, but a kernel may fail for one alone
    rows_in: tuple[torch.dtype, ...] = ()  # tensors of x's shape that are read for the form
    rows_out: tuple[torch.dtype, ...] = ()  # and that are written
    names_in: tuple[str, ...] = ()  # of rows_in
    tables: tuple[str, ...] = ()  # of these, those of few rows, which an index names for each row of x
    by_key: bool = False  # a sample is the rows for which the index names one row of tables, wherever they lie
    stored: tuple[int, ...] = (0,)  # which of the form's gradients of rows a backward stores, that of x first
    y_dtype: torch.dtype | None = None  # if it is not x's
    packed: bool = False  # x and the gate are columns of one tensor, and a backward writes the gradient of that tensor
    steps: tuple[torch.dtype, ...] = ()  # to which a forward rounds its steps (outputs.Steps); () if it does not
    # Of a call whose modulations belong to samples of rows. A backward has partials of its sums for each sample.
    by_sample: int = 0  # of a backward: modulations of which a sample of rows shares a row, absent ones left out
    sample_divisor: int = 0  # common divisor of MOST_ROWS_OF_TILE and the rows of a sample; 0: there are no two samples
    shared: tuple[torch.dtype, ...] = ()  # modulations that are read once for a sample, not for each row
    names_shared: tuple[str, ...] = ()
    summed: tuple[int, ...] = ()  # which of the form's gradients are summed over the rows of a sample
    sums_out: tuple[torch.dtype, ...] = ()  # dtypes of these sums
    beside: tuple[tuple[str, torch.dtype], ...] = ()  # parameters beside weight and bias, which no register holds
    scattered: bool = False  # whether a sum is wanted over rows that are not next to each other

    @property
    def title(self) -> str:
        return f"{self.norm}_norm {self.direction}"

    @cached_property
    def is_forward(self) -> bool:
        return self.direction == "forward"

    @property
    def writes_rows(self) -> bool:
        """Whether the call has outputs that belong to a row, and not only sums over rows."""
        return self.is_forward or self.wants_dx

    @property
    def ring_divisor(self) -> int:
        """What the rows of a ring's tile must divide; 0: any number does. Rows in an order do not lie side by side."""
        return 1 if self.by_key else self.sample_divisor

    @property
    def width(self) -> int:
        """Columns of x: those of all groups."""
        return self.cols * self.form.groups

    @cached_property
    def acc_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.x_dtype, *self.rows_in)

    @property
    def reads_bias(self) -> bool:
        """Whether the bias's values are read. Most backwards need its dtype alone."""
        return self.bias_dtype is not None and (self.is_forward or self.form.reads_u)

    @cached_property
    def num_sums(self) -> int:
        """How many sums over rows (dw, db, gradients of modulations) the call wants. CTAs store partials of them."""
        return self.wants_dw + self.wants_db + len(self.summed)

    @cached_property
    def inside(self) -> NormProblem:
        """What kernels hold for each element and sum where they fold a scale that rows share into the weight: see
        kernels.config.Norm.inside. Without a weight it would save nothing."""
        if "scale" not in self.names_shared or self.weight_dtype is None or self.steps:
            return self
        left = [pair for pair in zip(self.names_shared, self.shared, strict=True) if pair[0] not in ("scale", "shift")]
        of_scale, of_shift = 1 in self.summed, 2 in self.summed
        has_bias = self.is_forward and (self.bias_dtype is not None or "shift" in self.names_shared)
        return replace(
            self, weight_dtype=self.acc_dtype, bias_dtype=self.acc_dtype if has_bias else None,
            wants_dw=self.wants_dw or of_scale, wants_db=self.wants_db or of_shift or (of_scale and self.reads_bias),
            shared=tuple([dtype for _, dtype in left]), names_shared=tuple([name for name, _ in left]),
            summed=tuple([gradient for gradient in self.summed if gradient > 2]),
        )  # fmt: skip

    @cached_property
    def wants_float32_sum(self) -> bool:
        """Whether one of these is one."""
        own = self.wants_dw and self.weight_dtype, self.wants_db and self.bias_dtype
        return is_float32_sum(self.acc_dtype, *own, *self.sums_out)

    @cached_property
    def large(self) -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]:
        """Dtypes of the tensors with a row for each row of x that a call reads, and of those that it writes."""
        rows_in = [of for at, of in enumerate(self.rows_in) if not (self.tables and self.names_in[at] in self.tables)]
        read = self.x_dtype, self.grad_dtype, self.residual_dtype, *rows_in
        return tuple(filter(None, read)), (*self.rows_out, *[self.y_dtype or self.x_dtype] * self.writes_rows)

    def owns_columns(self, chunk: int, num_warps: int) -> bool:
        """Whether the threads have different columns of a chunk: the compiler gives each 16 bytes of the narrowest."""
        return chunk * min(each.itemsize for each in self.large[0]) >= 512 * num_warps

    @cached_property
    def traffic(self) -> tuple[int, int, int, int]:
        """Large tensors that a call reads and writes, sums over rows that it wants, and rows that samples share."""
        return *map(len, self.large), self.num_sums, len(self.shared)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of each element of a row that are read and that are written."""
        return tuple(sum(each.itemsize for each in dtypes) for dtypes in self.large)

    @cached_property
    def quantities(self) -> dict[str, Any]:
        """The names by which data files ask for what a problem has: those of its fields, and others."""
        own = self.x_dtype, self.grad_dtype, self.residual_dtype, self.weight_dtype, self.bias_dtype, self.y_dtype
        x, grad, residual, weight, bias, y = map(bytes_of, own)
        parameters, others = [each for each in (weight, bias) if each], self.rows_in + self.shared
        named = [*zip(self.names_in, self.rows_in, strict=False)]
        # A forward keeps the row that is normalized from its statistics to y, and what its last step reads of no table.
        normalized = self.x_dtype if not self.rows_out else self.rows_out[0] if self.form.rounds_sum else self.acc_dtype
        held = normalized, *[of for name, of in named[self.form.rows_before :] if name not in self.tables]
        # Each element of scattered rows has an address and a predicate of its own. The compiler tests one column in 16
        # for the end of a row that is not odd. TMA copies a row that is in small pieces by 16 bytes. A forward holds
        # rows that are wider than x's if they are a weight that it makes in float32, or modulations.
        return vars(self) | dict(
            forward=self.is_forward, writes_rows=self.writes_rows, layer=self.norm == "layer",
            odd=self.cols % 16 != 0, activates=self.form.activates, accumulators=self.acc_dtype.itemsize // 4,
            bfloat16=self.x_dtype == torch.bfloat16, in_small_pieces=self.cols * x % 32 != 0, x_bytes=x, y_bytes=y,
            grad_bytes=grad, mixed=x != grad, residual_bytes=residual, held_bytes=sum(map(bytes_of, held)),
            widest=max(x, grad, *map(bytes_of, self.rows_in)), widest_beside=max(map(bytes_of, others), default=0),
            narrow=max(x, grad, *parameters, 2) == 2 and not others, weight_bytes=weight, parameters=len(parameters),
            wide_parameters=parameters.count(8), parameter_bytes=weight + bias, reads_bias=self.reads_bias,
            holds_wide=self.is_forward and (self.inside is not self or max(map(bytes_of, self.shared), default=0) > x),
            rows_in=len(self.rows_in), bytes_in=sum(map(bytes_of, self.rows_in)), rows_or_shared=len(others) > 0,
            late_bytes=sum(bytes_of(of) for name, of in named if name in self.form.late), shared_rows=len(self.shared),
            moved=len(self.rows_in + self.rows_out), shared_bytes=sum(map(bytes_of, self.shared)),
            sums=self.num_sums, summed=len(self.summed) > 0, modulates=self.form.modulates,
            modulations_by_row=self.form.modulates and any(name in MODULATIONS for name in self.names_in),
        )  # fmt: skip

    @property
    def wants_any(self) -> bool:
        """Whether the call has an output of those that every kernel has."""
        return self.writes_rows or self.wants_dw or self.wants_db
