"""PTX's arithmetic on numpy rows of 32 lanes.

Results are rounded to nearest even, as PTX says. Where the simulation is not exact:
- An fma of float32 rounds once, except to a subnormal result, which it rounds twice. An fma of float64 rounds twice.
- Approximate instructions (sqrt.approx, ex2.approx, ...) give the exact result rounded: a GPU's last bits may differ.
  Approximate divisions multiply by the divisor's rounded inverse. As on a GPU, n * c / n is not always c.
"""

from __future__ import annotations

import struct

import numpy as np

DTYPES = {f"{kind}{bits}": f"{name}{bits}" for kind, name in (("u", "uint"), ("s", "int")) for bits in (8, 16, 32, 64)}
DTYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)} | {"pred": "bool"}
LANES = np.arange(32)
HALF_ULP = np.uint64(1 << 28)  # half an ulp of a float32, in the bits of a float64's mantissa
BELOW_FLOAT = np.uint64((1 << 29) - 1)  # the bits of a float64's mantissa that a float32 lacks
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal

RANK_SHIFT, OFFSET_BITS = 24, (1 << 24) - 1  # an address by mapa: the CTA's rank + 1, then the byte
COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip


def numpy_kind(kind: str) -> str:
    return kind.replace("b", "u") if kind[0] == "b" else kind


def number(text: str, kind: str):
    """An immediate operand as a numpy scalar."""
    dtype = np.dtype(DTYPES[numpy_kind(kind)])
    if text[:2] in ("0f", "0F", "0d", "0D"):
        value = struct.unpack(">f" if text[1] in "fF" else ">d", bytes.fromhex(text[2:]))[0]
        real = np.dtype(np.float32 if text[1] in "fF" else np.float64).type(value)
        return real.astype(dtype) if dtype.kind == "f" else real.view(dtype)
    if dtype.kind in "fb":
        return dtype.type(float(text))
    value = int(text.rstrip("U"), 0) & ((1 << (8 * dtype.itemsize)) - 1)
    return np.array(value, f"uint{8 * dtype.itemsize}").view(dtype)[()]


def odd_fma(a, b, c):
    """a * b + c of float32 in float64, rounded to odd: rounding it to fewer bits gives what rounding once would.

    The product is exact. An even sum is moved by one bit towards the exact sum, if it is not that."""
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)  # exact, by Knuth's two-sum
    odd = total.view(np.int64) & 1
    away = np.where((error > 0) == (total > 0), 1, -1)
    return (total.view(np.int64) + np.where((np.abs(error) > 0) & (odd == 0), away, 0)).view(np.float64)


def fma(a, b, c):
    """a * b + c in float32, rounded once: only at a tie of the sum in float64 does that take `odd_fma`."""
    total = np.multiply(a, b, dtype=np.float64) + c
    if ((total.view(np.uint64) & BELOW_FLOAT) == HALF_ULP).any():
        total = odd_fma(a, b, c)
    return total.astype(np.float32)


def multiply_add(a, b, c):
    return a * b + c


def multiply_wide(a, b, c=0):
    return np.multiply(a, b, dtype=f"{a.dtype.kind}{2 * a.itemsize}") + c


def multiply_high(a, b):
    return (multiply_wide(a, b) >> 8 * a.itemsize).astype(a.dtype)


def permute(a, b, selector):
    """The prmt instruction: each nibble of the selector names one of the eight bytes of a and b. A nibble with its high
    bit set gives the sign of that byte in all bits of the result's byte."""
    bytes_of_both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros_like(a)
    for at in range(4):
        nibble = (selector >> np.uint32(4 * at)) & np.uint32(15)
        byte = (bytes_of_both >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        byte = np.where(nibble & 8, (byte >> 7) * np.uint32(255), byte)
        result |= byte << np.uint32(8 * at)
    return result


def flush(x):
    """x with zeros of the same sign in place of subnormal numbers."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def multiply_by_inverse(a, b):
    return a * (np.float32(1) / b)


def sqrt_ftz(x):
    return flush(np.sqrt(flush(x)))


def rsqrt_ftz(x):
    return flush(1 / np.sqrt(flush(x)))


def exp2_ftz(x):
    return flush(np.exp2(flush(x)))


def to_odd(x):
    """float64 to float32, rounded to odd: the last bit is 1 if anything was lost.

    A further rounding to a shorter type is then as exact as a rounding from float64.
    """
    near = x.astype(np.float32)
    lost, bits = x - near, near.view(np.int32)
    step = np.where((lost > 0) != np.signbit(near), 1, -1)
    return (bits + np.where((np.abs(lost) > 0) & (bits & 1 == 0), step, 0).astype(np.int32)).view(np.float32)


def to_bf16(x):
    x = to_odd(x) if x.dtype == np.float64 else x
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_f16(x):
    return x.astype(np.float16).view(np.uint16)


def divide_integers(a, b):
    """The quotient of integers, rounded towards zero."""
    b = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a // b
    return (np.abs(a) // np.abs(b)) * np.where((a < 0) != (b < 0), -1, 1).astype(a.dtype)


def shift_left(x, amount):
    """An amount of at least x's number of bits gives 0, in numpy as in PTX."""
    return np.left_shift(x, amount.astype(x.dtype))


def shift_right(x, amount):
    return np.right_shift(x, amount.astype(x.dtype))


def extract(x, position, length):
    """The bit field of `length` bits from `position` on; signed if x's type is."""
    bits, position, length = 8 * x.dtype.itemsize, position.astype(x.dtype), length.astype(x.dtype)
    if (length == 0).any() or (length > bits - position).any():
        raise ValueError("bfe of bits that there are not")
    return (x << (bits - position - length)) >> (bits - length)


def count_ones(x):
    return np.bitwise_count(x).astype(np.uint32)


def select(a, b, chosen):
    return np.where(chosen, a, b)


def compare(how, a, b):
    """With a NaN, ordered comparisons ("lt") are false and unordered ones, of three letters ("ltu"), are true."""
    nan = np.isnan(a) | np.isnan(b)
    if how in ("num", "nan"):
        return nan == (how == "nan")
    return np.where(nan, len(how) == 3, getattr(np, COMPARE[how[:2]])(a, b))


def shared_of_rank(address, rank):
    """The mapa instruction: an address in this CTA's shared memory as an address in that of another CTA."""
    return (address & np.uint32(OFFSET_BITS)) | ((rank + np.uint32(1)) << np.uint32(RANK_SHIFT))


def sources(mode: str, b, c):
    """The lane that each lane of a shfl takes its value from."""
    b, c = b.astype(np.int64) & 31, c.astype(np.int64)
    segment, clamp = (c >> 8) & 31, c & 31
    most, least = (LANES & segment) | (clamp & ~segment), LANES & segment
    source = {"bfly": LANES ^ b, "idx": least | (b & ~segment), "down": LANES + b, "up": LANES - b}[mode]
    return np.where(source >= most if mode == "up" else source <= most, source, LANES)


def shuffle(mode: str, values, b, c):
    return values[sources(mode, b, c)]


def reduced(how: str, values):
    """The redux instruction: each lane gets the sum, or the extremum, of all lanes."""
    of_all = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
    return np.full_like(values, of_all.reduce(values, dtype=values.dtype))
