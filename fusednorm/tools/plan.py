"""python -m fusednorm plan: says which plan runs for a problem on a GPU, and why. It needs no GPU."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any, get_args, get_type_hints

import torch

from ..dtypes import DTYPES
from ..forms import Settings
from ..host import gpus
from ..operands import DIRECTIONS, FORM_NAMES, NORMS
from ..planner import device
from ..planner.device import DeviceSpec
from ..planner.plan import VARIANTS
from .explanation import explain_problem, samples_of
from .warm import Wanted, form_named

VARIANT_TEXTS = {
    "multi_wave": "Triton kernels for every GPU. CTAs load rows straight to registers. Rows too wide for that go by\n"
    "column tiles, which read x twice.",
    "async_copy": "On GPUs without TMA threads copy rows to shared memory, in backwards of rows that registers do\n"
    "not hold.",
    "pipelined": "From sm_90 on. TMA copies rows to shared memory, some tiles ahead. Wide rows are shared by the CTAs\n"
    "of a cluster.",
    "warp_specialized": "From sm_90 on. As pipelined, but a warp of its own makes the copies. Preferred on Blackwell.",
    "reference": "ATen's kernels.",
}
KINDS: dict[Any, dict[str, Any]] = {
    float: {"type": float, "metavar": "C"},
    int: {"type": int, "metavar": "N"},
    bool: {"action": argparse.BooleanOptionalAction},
    str: {"metavar": "NAME"},
}


def add_plan_arguments(parser: argparse.ArgumentParser, rows: str = "16384", cols: str = "4096") -> None:
    """rows, cols: the defaults, for the help."""
    texts = (f"  {name:<18}{text.replace(chr(10), chr(10) + ' ' * 20)}" for name, text in VARIANT_TEXTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["variants:", *texts])
    parser.add_argument("--rows", type=positive, nargs="+", help=f"row counts (default: {rows})")
    parser.add_argument("--cols", type=positive, nargs="+", help=f"row lengths (default: {cols})")
    parser.add_argument("--norm", choices=NORMS, default="layer", help="default: layer")
    parser.add_argument(
        "--pass", dest="direction", choices=DIRECTIONS, default="backward", help="default: backward"
    )
    parser.add_argument("--form", choices=FORM_NAMES, default="", help="default: the norm alone")
    for name, hint in get_type_hints(Settings).items():
        kind, *_ = (*get_args(hint), hint)  # that of an optional one
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, **KINDS[kind], help="of a form: an argument of its function")
    samples_help = "rows that share a row of each modulation, of a modulated form (default: all rows)"
    parser.add_argument("--sample-rows", type=positive, metavar="N", help=samples_help)
    modulation_help = "of scale, shift and gate of a modulated form (default: that of x)"
    parser.add_argument("--modulation-dtype", choices=DTYPES, help=modulation_help)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x and the gradient (default: bf16)")
    parser.add_argument("--weight-dtype", choices=DTYPES, help="of weight and bias (default: that of x)")
    names = ", ".join(spec.name for spec in device.KNOWN)
    device_help = f"{names}, or such a GPU's name as torch gives it (default: this machine's GPU, or H200)"
    parser.add_argument("--device", type=_device, metavar="NAME", help=device_help)
    parser.add_argument("--sm-margin", type=_count, default=0, metavar="N", help="SMs that are left to others")
    parser.add_argument("--force", choices=VARIANTS, metavar="VARIANT", help="run this variant if it can run")


def run(options: argparse.Namespace) -> int:
    try:
        spec = device_of(options)
        shapes = list(itertools.product(options.cols or [4096], options.rows or [16384]))
        cases = [(rows, wanted_of(options, cols, rows).call()) for cols, rows in shapes]
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for index, (rows, call) in enumerate(cases):
        explanation = explain_problem(call.problem, rows, spec, options.force, call.sample_rows)
        if options.json:
            print(json.dumps(explanation.as_dict()))
        else:
            print("\n" * (index > 0) + str(explanation))
    return 0


def wanted_of(options: argparse.Namespace, cols: int, rows: int) -> Wanted:
    """A call of contiguous rows with all outputs wanted."""
    samples, modulations = samples_of("plan", options.sample_rows, rows), DTYPES.get(options.modulation_dtype)
    named = options.form, {name: getattr(options, name) for name in Settings.__annotations__}
    form, settings = form_named("plan", *named, sample_rows=samples, modulation_dtype=modulations)
    has_bias = options.norm == "layer"
    dtypes = DTYPES[options.dtype], DTYPES[options.weight_dtype or options.dtype]
    more = has_bias, (True, True, has_bias), None, form, settings, samples, modulations
    return Wanted(options.norm, options.direction, cols, *dtypes, *more)


def device_of(options: argparse.Namespace) -> DeviceSpec:
    this = gpus.spec_of(torch.device("cuda")) if torch.cuda.is_available() else device.H200
    return (options.device or this).leaving(options.sm_margin)


def _device(name: str) -> DeviceSpec:
    try:
        return gpus.with_installed_triton(gpus.named(name))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)
