"""The formulas of both norms, for all kernels.

Pure jit functions on register tiles, called from Triton and from Gluon kernels. A tile is [rows, columns]; statistics
and row sums are [rows, 1] and broadcast. In row_tile.py both have the CTAs of a cluster as a dimension between these.
`norm` is a config.Norm. All values are in the accumulation dtype.

With x_hat = (x - mean) * rstd (LayerNorm) or x * rstd (RMSNorm) and g = the gradient of x_hat, over a row of N columns:

    dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g))        (the last term for LayerNorm only)

What precedes and follows x_hat is a config.Form, of steps that are functions here, each with its formula. With the
offset c of the weight and h, the row that is normalized, for x above:

    u = x_hat * (c + w) + b
    du = the gradient of u,  dh = that of h, in place of dx above
    g = du * (c + w),  dw = sum over rows of du * x_hat,  db = sum over rows of du

(Ba, Kiros, Hinton, "Layer Normalization", 2016; Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019.)
"""

import functools
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from .config import Form
from .ptx import to_bfloat16, widen_pairs


@triton.jit
def widen(x, in_pairs: tl.constexpr = False, dtype: tl.constexpr = tl.float32):
    """x in `dtype`; the placeholder of an absent operand as it is. `in_pairs` converts bfloat16 by ptx.widen_pairs,
    which is quicker and takes more registers."""
    if not isinstance(x, tl.tensor):
        wide = x
    elif in_pairs and x.dtype == tl.bfloat16:
        wide = widen_pairs(x)
    else:
        wide = x.to(dtype)
    return wide


@triton.jit
def kept(value, norm: tl.constexpr):
    """value, as an operand or a result that LLVM does not narrow. It computes a sum or a product of two numbers of 16
    bits in float16 if nothing but that of it is used (InstCombine, fptrunc of fpext), also where these are bfloat16 and
    lie beyond float16's range or between its numbers. Adding 0 hides what value is, and changes nothing but -0."""
    if norm.mixes_halves:
        value += 0.0
    return value


@triton.jit
def inverse_std(mean_square, eps, norm: tl.constexpr, at_once: tl.constexpr = False):
    """1 / sqrt(mean_square + eps): rstd from the variance (LayerNorm) or the mean square (RMSNorm). If squares
    overflowed, LayerNorm's is NaN, because y would be the bias; RMSNorm's is 0, as ATen's. `at_once`: by an instruction
    for both, of which narrow rows have many."""
    if at_once and not norm.fp64:
        rstd = tl.rsqrt(mean_square + eps)
    else:
        rstd = 1.0 / tl.sqrt(mean_square + eps)
    if norm.layer:
        rstd += mean_square * 0.0
    return rstd


@triton.constexpr_function
def sums_equal_elements(dtype, acc, columns):
    """True if a sum of up to `columns` equal elements of `dtype` is exact in `acc`, in any order."""
    return columns <= 2 ** (acc.fp_mantissa_width - dtype.fp_mantissa_width)


@triton.jit
def sums_in_pairs(x, times: tl.constexpr):
    """Sums of 2**times adjacent columns each: pairs of columns, then pairs of these. That of equal elements is exact,
    because each step doubles them."""
    for _ in tl.static_range(times):
        a, b = columns_of_pairs(x)
        x = a + b
    return x


@triton.jit
def quotient(total, count):
    """total / count with its rounding error taken away, which makes it c for a total of count * c. Triton's own
    division of float32 may be off by two ulps, and its correctly rounded one takes a call."""
    rounded = total / count
    return rounded + tl.fma(-rounded, tl.cast(count, total.dtype), total) / count


@triton.jit
def corrected_moments(mean, deviations, squares, count):
    """Mean and variance from a rounded mean, the sum of the `count` deviations from it and that of their squares: the
    corrected two-pass algorithm (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983). The
    corrected mean of equal elements is that element: their deviations, a few ulps at most, are exact."""
    error = quotient(deviations, count)
    variance = squares / count - error * error
    return mean + error, tl.where(variance < 0.0, 0.0, variance)


@triton.jit
def normalize(x, mean, rstd, norm: tl.constexpr):
    """x_hat; exactly 0 where x is the mean. x * rstd - mean * rstd, one multiply-add, is not: it rounds one of the two
    products."""
    if norm.layer:
        x_hat = (x - mean) * rstd
    else:
        x_hat = x * rstd
    return x_hat


@triton.jit
def input_gradient(g, x, mean, rstd, mean_gx, mean_g, norm: tl.constexpr):
    """dx from g = dy * w, x, and the row means of g * x_hat and of g. The factors that are constant along a row are
    gathered. mean_g is subtracted last: where x is the mean, dx is rstd * (g - mean_g) with g as it was summed. The
    multiply-add is written out: compilers would take either product of it, dy * w or this one, by what else a kernel
    computes."""
    of_x = rstd * mean_gx
    if norm.layer:
        dx = tl.fma(mean - x, of_x, g) - mean_g
    else:
        dx = tl.fma(-x, of_x, g)
    return dx * rstd


@triton.jit
def gradient_beside_x_hat(g, x_hat, rstd, mean_gx, mean_g, norm: tl.constexpr):
    """`input_gradient` where x_hat is held, and x is not. This is exact where that is: x_hat is 0 where x is the mean.
    """
    dx = tl.fma(-x_hat, mean_gx, g)
    if norm.layer:
        dx -= mean_g
    return dx * rstd


@triton.jit
def gradient_beside_scaled(g, x, rstd, mean_gx, mean_g, norm: tl.constexpr):
    """`input_gradient` from rstd * g in place of g, x - mean in place of x (RMSNorm: x), and row means of rstd * g
    times that and of rstd * g."""
    dx = tl.fma(x, -(rstd * mean_gx) * rstd, g)
    if norm.layer:
        dx -= mean_g
    return dx


@triton.constexpr_function
def snaps(norm, dtype):
    """Whether `snapped` is worth its instructions: for gradients of y in float32, whose equal elements have no exact
    sum. Those of 16 bits have one, up to hundreds or thousands of columns. Gates and modulations leave none equal."""
    return norm.layer and not norm.fp64 and dtype == tl.float32 and norm.form.to_du is du_alone


@triton.jit
def snapped(mean_g, some_g):
    """The mean of g; some element of the row's g where both agree but for the rounding of the sum: some 32 additions
    in a row, each off by 2^-25 on average. So the mean of equal elements is that element, and dx is 0 where x is the
    mean."""
    return tl.where(tl.abs(mean_g - some_g) <= 2.0**-20 * tl.abs(some_g), some_g, mean_g)


@triton.jit
def row_means(sum_gx, sum_g, cols, norm: tl.constexpr):
    """Means of g * x_hat and of g over each row, [rows, 1] each, from sums [rows, n]; for the portable kernels. One
    reduction of both takes half the CTA barriers of two reductions."""
    if norm.layer:
        mean_gx, mean_g = tl.split(quotient(tl.sum(tl.join(sum_gx, sum_g), axis=1), cols))
    else:
        mean_gx = tl.sum(sum_gx, axis=1) / cols
        mean_g = mean_gx
    return mean_gx[:, None], mean_g[:, None]


# --- The steps of forms ---


@triton.jit
def x_alone(tiles, stored: tl.constexpr, norm: tl.constexpr):
    return tiles[0]


@triton.jit
def total(tiles, stored: tl.constexpr, norm: tl.constexpr):
    """x + residual in the widest of their dtypes and the accumulation dtype; x without a residual."""
    h = tiles[0].to(norm.acc)
    if norm.has_row("residual"):
        h += tiles[norm.row("residual")]
    return kept(h, norm)


@triton.jit
def rounded_total(tiles, stored: tl.constexpr, norm: tl.constexpr):
    return total(tiles, stored, norm).to(stored)


@triton.jit
def logistic(z, dtype: tl.constexpr):
    """1 / (1 + exp(-z)) of numbers that came in a dtype. In float32 it takes five instructions instead of eleven: exp2
    and rsqrt, unlike exp and a division, are one each. The rounding of z * log2(e) makes the relative error up to
    |z| * 2^-24, and the square has twice the error of its root. Outputs of 16 bits hide both in their own; where z has
    more, four instructions take away the first, and three the second, by a step of Newton. As a multiply-add the square
    cannot become part of another, which would round it in some builds and not in others."""
    if z.dtype == tl.float32:
        exponent = z * -1.4426950408889634
        power = tl.exp2(exponent)
        if dtype.primitive_bitwidth > 16:
            lost = tl.fma(exponent, tl.cast(-0.6931471805599453, tl.float32), -z)
            power = tl.where(tl.abs(z) < 88.0, tl.fma(power, lost, power), power)
        power += 1.0
        root = tl.rsqrt(power)
        found = tl.fma(root, root, tl.cast(0.0, tl.float32))
        if dtype.primitive_bitwidth > 16:
            finite = tl.minimum(power, 3e38)  # found is 0 where power is inf
            found = tl.fma(found, tl.fma(-finite, found, tl.cast(1.0, tl.float32)), found)
    else:
        found = 1.0 / (1.0 + tl.exp(-z))
    return found


@triton.jit
def silu(z, dtype: tl.constexpr):
    """z * sigmoid(z) and its derivative."""
    s = logistic(z, dtype)
    return z * s, s + z * s * (1.0 - s)


@triton.jit
def sigmoid(z, dtype: tl.constexpr):
    """sigmoid(z) and its derivative."""
    s = logistic(z, dtype)
    return s, s * (1.0 - s)


@triton.jit
def gate_of(tiles, norm: tl.constexpr):
    """act(gate) and its derivative."""
    gate = tiles[norm.row("gate")]
    return norm.form.activation(gate.to(norm.acc), gate.dtype)


@triton.jit
def as_step(value, nth: tl.constexpr, norm: tl.constexpr):
    """Rounded as code of the operands' dtypes rounds it, if the form does."""
    if norm.rounds_steps:
        value = kept(kept(value, norm).to(norm.step(nth)).to(norm.acc), norm)
    return value


@triton.jit
def product(a, b, nth: tl.constexpr, norm: tl.constexpr):
    """a * b as a step. As a multiply-add it is rounded in float32, too, before something is added to it."""
    if norm.rounds_steps:
        found = as_step(tl.fma(a, b, tl.cast(0.0, norm.acc)), nth, norm)
    else:
        found = a * b
    return found


@triton.jit
def gated(tiles, stored: tl.constexpr, norm: tl.constexpr):
    """x * act(gate). As a multiply-add it is rounded wherever it is read: what a LayerNorm subtracts its mean from is
    what it took the mean of, so that equal elements have deviations of 0."""
    factor, _ = gate_of(tiles, norm)
    return tl.fma(tiles[0].to(norm.acc), factor, tl.cast(0.0, norm.acc))


@triton.jit
def gated_total(tiles, stored: tl.constexpr, norm: tl.constexpr):
    """residual + gate * x"""
    branch = product(tiles[0].to(norm.acc), tiles[norm.row("gate")].to(norm.acc), 0, norm)
    return kept(branch + tiles[norm.row("residual")], norm)


@triton.jit
def rounded_gated_total(tiles, stored: tl.constexpr, norm: tl.constexpr):
    return gated_total(tiles, stored, norm).to(stored)


@triton.jit
def in_full(x_hat, tiles, norm: tl.constexpr):
    return x_hat


@triton.jit
def as_x(x_hat, tiles, norm: tl.constexpr):
    """x_hat rounded to the dtype of x."""
    return kept(x_hat.to(tiles[0].dtype).to(norm.acc), norm)


@triton.constexpr_function
def hides_rounding(norm):
    """Whether `as_x` rounds by ptx.to_bfloat16. A product of x_hat and the weight that is itself rounded next LLVM
    computes in 16 bits, two at a time, as long as it sees that x_hat was rounded. Where a ring has more row tensors,
    builds would spill."""
    form = norm.form
    alters_product = norm.has_bias or form.weight_offset != 0 or form.factor is not None or form.turn_u is not None
    return alters_product and len(norm.rows_in) == 0


@triton.jit
def as_x_compiled(x_hat, tiles, norm: tl.constexpr):
    """`as_x` in kernels that are never interpreted."""
    if tiles[0].dtype == tl.bfloat16 and x_hat.dtype == tl.float32 and hides_rounding(norm):
        rounded = to_bfloat16(x_hat)
    else:
        rounded = as_x(x_hat, tiles, norm)
    return rounded


@triton.constexpr_function
def multiplies_in_16_bits(norm, tiles, weight, bias, y_dtype):
    """Whether y is a rounded x_hat times the weight plus the bias, all of y's 16 bits: ptx.multiply_add_of_16_bits.
    Without a bias LLVM multiplies pairs by itself. The rounding of interpreted kernels is not `as_x_compiled`."""
    form = norm.form
    if not (norm.has_weight and norm.has_bias and form.round_x_hat is as_x_compiled):
        return False
    alone = form.scale is times_weight and form.shift is plus_bias and form.finish is u_alone
    return alone and y_dtype.primitive_bitwidth == 16 and {tiles[0].dtype, weight.dtype, bias.dtype} == {y_dtype}


@triton.jit
def times_weight(x, weight, norm: tl.constexpr):
    if norm.has_weight:
        x *= weight
    return x


@triton.jit
def times_offset_weight(x, weight, norm: tl.constexpr):
    if norm.has_weight:
        x *= norm.form.weight_offset + weight
    return x


@triton.jit
def plus_bias(x, bias, norm: tl.constexpr):
    if norm.has_bias:
        x += bias
    return x


@triton.jit
def u_alone(u, tiles, norm: tl.constexpr):
    return u


@triton.jit
def plus_residual(u, tiles, norm: tl.constexpr):
    """u + residual; u without a residual."""
    if norm.has_row("residual"):
        u += tiles[norm.row("residual")]
    return u


@triton.jit
def times_gate(u, tiles, norm: tl.constexpr):
    """u * act(gate); in a backward of dy."""
    factor, _ = gate_of(tiles, norm)
    return u * factor


@triton.jit
def u_times_gate(u, tiles, norm: tl.constexpr):
    if norm.rounds_u:
        u = u.to(tiles[0].dtype).to(norm.acc)
    return times_gate(u, tiles, norm)


@triton.jit
def one_plus(scale):
    return 1.0 + scale, 1.0


@triton.jit
def identity(scale):
    return scale, 1.0


@triton.jit
def tanh(scale):
    """Near 0, where 1 - exp(-2 * size) would cancel, by its series; of float64 by that difference without the rounding
    error of exp (Kahan's expm1: (e - 1) * y / log(e) with e = exp(y)). Else by exp of a number that is not positive,
    which does not overflow."""
    size = tl.abs(scale)
    small = tl.exp(-2.0 * size)
    if scale.dtype == tl.float32:
        size = (1.0 - small) / (1.0 + small)
        found = tl.where(scale < 0.0, -size, size)
        square = scale * scale
        series = 62.0 / 2835.0 - square * (1382.0 / 155925.0)
        series = 2.0 / 15.0 + square * (square * series - 17.0 / 315.0)
        found = tl.where(square < 0.09, scale + scale * square * (square * series - 1.0 / 3.0), found)
    else:
        missing = tl.where(size < 0.25, (1.0 - small) * (-2.0 * size) / tl.log(small), 1.0 - small)
        missing = tl.where(small == 1.0, 2.0 * size, missing)
        size = missing / (1.0 + small)
        found = tl.where(scale < 0.0, -size, size)
    return found, 1.0 - found * found


@triton.jit
def factor_of(tiles, norm: tl.constexpr):
    """What u is multiplied by, and its derivative."""
    return norm.form.factor(tiles[norm.row("scale")].to(norm.acc))


@triton.jit
def plus_shift(u, tiles, norm: tl.constexpr):
    """u + shift; u without a shift."""
    if norm.has_row("shift"):
        u += tiles[norm.row("shift")].to(norm.acc)
    return u


@triton.jit
def modulated(u, tiles, norm: tl.constexpr):
    """u * factor(scale) + shift"""
    factor, _ = factor_of(tiles, norm)
    return plus_shift(product(as_step(u, 1, norm), as_step(factor, 2, norm), 3, norm), tiles, norm)


@triton.jit
def modulated_plus_residual(u, tiles, norm: tl.constexpr):
    return plus_residual(modulated(u, tiles, norm), tiles, norm)


@triton.jit
def plus_shift_and_residual(u, tiles, norm: tl.constexpr):
    return plus_residual(plus_shift(u, tiles, norm), tiles, norm)


@triton.jit
def folded_weight(weight, scale, norm: tl.constexpr):
    """The weight of norm.inside."""
    factor, _ = norm.form.factor(scale.to(norm.acc))
    return norm.form.scale(factor, weight, norm)


@triton.jit
def folded_bias(bias, scale, norm: tl.constexpr):
    """The bias of norm.inside, but for the shift."""
    factor, _ = norm.form.factor(scale.to(norm.acc))
    return factor * bias


@triton.jit
def sums_of_modulated(of_x_hat, of_dy, weight, bias, scale, norm: tl.constexpr):
    """dw, db and the gradients of a scale and a shift from the sums of dy * x_hat and of dy over rows that share them.
    """
    factor, slope = norm.form.factor(scale.to(norm.acc))
    of_u = norm.form.scale(of_x_hat, weight, norm)
    if norm.has_bias:
        of_u += bias * of_dy
    return of_x_hat * factor, of_dy * factor, of_u * slope, of_dy


@triton.jit
def du_alone(dy, tiles, norm: tl.constexpr):
    return dy


@triton.jit
def of_folded(dy, tiles, norm: tl.constexpr):
    """dy: the weight has the factor."""
    return dy


@triton.jit
def times_factor(dy, tiles, norm: tl.constexpr):
    factor, _ = factor_of(tiles, norm)
    return dy * factor


@triton.jit
def times_x_hat(du, x_hat, norm: tl.constexpr):
    return du * x_hat


@triton.jit
def unchanged(du, norm: tl.constexpr):
    return du


@triton.jit
def dh_alone(dh, dy, x_hat, weight, bias, tiles, norm: tl.constexpr):
    return (dh,)


@triton.jit
def dh_of_summands(dh, dy, x_hat, weight, bias, tiles, norm: tl.constexpr):
    return dh, dh


@triton.jit
def of_gated_x(dh, dy, x_hat, weight, bias, tiles, norm: tl.constexpr):
    factor, slope = gate_of(tiles, norm)
    return dh * factor, dh * tiles[0].to(norm.acc) * slope


@triton.jit
def of_gated_u(dh, dy, x_hat, weight, bias, tiles, norm: tl.constexpr):
    _, slope = gate_of(tiles, norm)
    u = norm.form.shift(norm.form.scale(x_hat, weight, norm), bias, norm)
    return dh, dy * u * slope


@triton.jit
def of_modulated(dh, dy, x_hat, weight, bias, tiles, norm: tl.constexpr):
    """Of h, the scale and the shift; then, of h = residual + gate * branch, of the branch and the gate."""
    _, slope = factor_of(tiles, norm)
    u = norm.form.shift(norm.form.scale(x_hat, weight, norm), bias, norm)
    return (dh, dy * u * slope, dy) + of_branch(dh, tiles, norm)


@triton.jit
def of_modulated_inside(dh, dy, x_hat, weight, bias, tiles, norm: tl.constexpr):
    """The same, with dy in the place of the scale's, which follows from sums."""
    return (dh, dy, dy) + of_branch(dh, tiles, norm)


@triton.jit
def of_branch(dh, tiles, norm: tl.constexpr):
    grads = ()
    if norm.has_row("branch"):
        gate = tiles[norm.row("gate")].to(norm.acc)
        grads = (dh * gate, dh * tiles[norm.row("branch")].to(norm.acc))
    return grads


# --- Maps of whole rows (Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021) ---


@triton.jit
def turn_halves(chunks, cos, sin, back: tl.constexpr, tile: tl.constexpr):
    """The first two chunks, a and b, as a * cos - b * sin and b * cos + a * sin; `back`: the transposed map.
    In a forward's sum the product with sin is rounded: of two rows of a thread, compilers might round the other one."""
    a = chunks[0]
    b = chunks[1]
    if back:
        found = (a * cos[0] + b * sin[1], b * cos[1] - a * sin[0])
    else:
        found = (a * cos[0] - b * sin[0], tl.fma(b, cos[1], a * sin[1]))
    for c in tl.static_range(2, tile.chunks):
        found = found + (chunks[c],)
    return found


@triton.jit
def turn_pairs(chunks, cos, sin, back: tl.constexpr, tile: tl.constexpr):
    """`turn_halves` of columns 2i and 2i + 1 in place of two chunks."""
    found = ()
    for c in tl.static_range(tile.chunks):
        turned = chunks[c]
        if c < tile.turned_chunks:
            a, b = columns_of_pairs(chunks[c])
            if tile.per_pair:
                cos_a = cos[c]
                cos_b = cos[c]
                sin_a = sin[c]
                sin_b = sin[c]
            else:
                cos_a, cos_b = columns_of_pairs(cos[c])
                sin_a, sin_b = columns_of_pairs(sin[c])
            if back:
                turned = tl.join(a * cos_a + b * sin_b, b * cos_b - a * sin_a)
            else:
                turned = tl.join(a * cos_a - b * sin_a, tl.fma(b, cos_b, a * sin_b))
            turned = turned.reshape(tile.rows, tile.chunk)
        found = found + (turned,)
    return found


@triton.jit
def columns_of_pairs(chunk):
    return tl.split(chunk.reshape(chunk.shape[0], chunk.shape[1] // 2, 2))


TURN = {False: turn_halves, True: turn_pairs}  # by whether pairs are adjacent columns


AFFINE = Form(
    combine=x_alone,
    round_x_hat=in_full,
    scale=times_weight,
    shift=plus_bias,
    finish=u_alone,
    to_du=du_alone,
    upstream=times_weight,
    to_dw=times_x_hat,
    to_db=unchanged,
    gradients=dh_alone,
)
FORMS: dict[str, Form] = {}  # of norms from outside the package, by FormSpec.name (fusednorm/forms.py)

ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}
# The functions of a FormSpec's steps that differ from AFFINE's, by their names.
COMBINE: dict[str, dict[str, Any]] = {
    "": {},
    "add": {"combine": rounded_total},
    "gate": {"combine": gated, "gradients": of_gated_x},
    "add_gated": {"combine": rounded_gated_total},
    "summands": {"gradients": dh_of_summands},
}
FINISH: dict[str, dict[str, Any]] = {
    "": {},
    "add": {"finish": plus_residual},
    "gate": {"finish": u_times_gate, "to_du": times_gate, "gradients": of_gated_u, "early": (1,)},
}
UNROUNDED = {rounded_total: total, rounded_gated_total: gated_total}  # without FormSpec.rounds_sum
FACTORS = {"one_plus": one_plus, "identity": identity, "tanh": tanh}
# With FormSpec.modulate: finish, and that of Norm.inside.
MODULATED = {
    u_alone: (modulated, plus_shift),
    plus_residual: (modulated_plus_residual, plus_shift_and_residual),
}
INSIDE = {"scale": times_weight, "to_du": of_folded, "upstream": times_weight, "gradients": of_modulated_inside}


@functools.cache
def form_of(spec) -> Form:
    """The functions of a FormSpec."""
    if spec.name:
        return FORMS[spec.name]
    times = times_offset_weight if spec.weight_offset else times_weight
    rounding = as_x_compiled if isinstance(as_x, triton.JITFunction) else as_x
    made = replace(
        AFFINE,
        round_x_hat=rounding if spec.rounds_x_hat else in_full,
        scale=times,
        upstream=times,
        activation=ACTIVATIONS[spec.activation] if spec.activates else None,
        weight_offset=spec.weight_offset,
        **COMBINE[spec.combine],
        **FINISH[spec.finish],
    )
    if spec.again:
        again = {"round_x_hat": made.round_x_hat, "scale": times, "weight_offset": spec.weight_offset}
        made = replace(made, again=replace(AFFINE, **again))
    if not spec.rounds_sum:
        made = replace(made, combine=UNROUNDED.get(made.combine, made.combine))
    if spec.modulate:
        finish, finish_inside = MODULATED[made.finish]
        inside = replace(made, finish=finish_inside, weight_offset=0.0, late=spec.late, **INSIDE)
        backward = {"to_du": times_factor, "gradients": of_modulated, "late": spec.late}
        made = replace(made, finish=finish, factor=FACTORS[spec.modulate], inside=inside, **backward)
    return made
