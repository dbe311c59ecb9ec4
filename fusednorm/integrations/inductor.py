"""torch.compile: norms of an unmodified model run this package's kernels in the graphs that Inductor compiles.

`enable_inductor()` wraps Inductor's entry point. For the duration of a compilation, and in its thread only, the wrapper

- makes ops of norms that the model has written by hand, and of norms with what surrounds them (rewriting.py);
- replaces the decompositions of the norms, which AOTAutograd applies as it traces forward and backward (routing.py);
- adds the pass over the joint graph, after the user's own passes, that folds casts and residual gradients into the
  backward ops, joins norms of packed q and k, and decides on forwards and on joins (folding.py);
- adds a tag to the keys of all compile caches. The keys do not cover decompositions: without the tag, a process with
  this package could load a graph that was compiled without it, and the reverse.

Outside of compilations nothing changes. Importing this module imports Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import torch
from torch._inductor import compile_fx as inductor
from torch._inductor import config

from .. import __version__
from . import folding, rewriting, routing
from .routing import Entry, Report, report

__all__ = ["Entry", "Report", "compile_graph", "disable_inductor", "enable_inductor", "report"]

# Further private names of torch that this module uses. If one is gone, the import fails here, not a compilation later.
_Settings = torch._TorchCompileInductorWrapper
_ = inductor.compile_fx, inductor.compile_fx_inner, config.joint_custom_post_pass, torch.compiler.config.cache_key_tag
_ = routing.decomposition.decompositions, routing.decomposition.fast_random_decomps
_stock_compile_fx: Callable[..., Any] | None = None  # Inductor's own compile_fx while enabled, else None
_joins = frozenset(rewriting.JOINS)  # the last ones given


class enable_inductor:  # noqa: N801  reads as a function: with enable_inductor(): ...
    """Let torch.compile's default backend run the norms of unmodified models on this package's kernels.

    In backward graphs, nn.LayerNorm, nn.RMSNorm, F.layer_norm, F.rms_norm and norms written by hand, all of CUDA
    tensors, become layer_norm_bwd and rms_norm_bwd, unless the op would cut a fusion that saves more. Forwards stay
    with Inductor, which fuses them with their neighbours, but for very wide rows and those that are joined.

    join says what becomes one op with its norm: a name or some, "all", or () for nothing.

    - "rotary": the norms of q and k and the rotation (RoPE), by halves or by pairs, behind both or before them; behind
      them also of norms over all heads.
    - "modulated": norm(h) * (1 + scale) + shift, together with a sum h = residual + gate * x or residual + x; and
      residual + gate * norm(x), or tanh(gate).
    - "gated": norm(x) * act(gate) and norm(x * act(gate)), act silu or sigmoid, also by groups of columns.
    - "packed": norms of q and k that are parts of one tensor beside v, with the gradient of that tensor.
    - "forwards": the forward of rows of more than 1024 columns, with a sum x + residual before the norm if there is
      one, where Inductor would fuse nothing else with it.

    fusednorm.integrations.inductor.report() lists the decision for each norm, with its form, its place in the model and
    the reason.

    Lasts until disable_inductor(). As a context manager, it restores the earlier state at the end of the block. Calling
    it again has no effect but on join. Graphs compiled before stay as they are until torch._dynamo.reset().
    """

    def __init__(self, *, join: str | Iterable[str] = "all") -> None:
        self._was_enabled, self._had_joins = _stock_compile_fx is not None, _joins
        _enable(rewriting.joins_of(join))

    def __enter__(self) -> enable_inductor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            _enable(self._had_joins)
        else:
            disable_inductor()


def disable_inductor() -> None:
    """Undo all calls of enable_inductor(). Compiled graphs stay as they are until torch._dynamo.reset()."""
    global _stock_compile_fx
    if _stock_compile_fx is not None:
        inductor.compile_fx = _stock_compile_fx
        _stock_compile_fx = None


def compile_graph(graph: torch.fx.GraphModule, inputs: list, *, mode: str | None = None, options: dict | None = None):
    """The backend of torch.compile(model, backend="fusednorm"): for this model alone, Inductor as under
    enable_inductor(). mode and options are those that torch.compile takes for Inductor. options["join"]
    is enable_inductor's.
    """
    given = dict(options or {})
    joins = rewriting.joins_of(given.pop("join", "all"))
    settings = _Settings(mode or "default", given, None).config
    compile_fx = _routed(_stock_compile_fx or inductor.compile_fx, lambda: joins)
    with config.patch(settings):
        return compile_fx(graph, inputs, config.patch(settings)(inductor.compile_fx_inner))


def _enable(joins: Set[str]) -> None:
    global _stock_compile_fx, _joins
    _joins = joins
    if _stock_compile_fx is None:
        _stock_compile_fx = inductor.compile_fx
        inductor.compile_fx = _routed(_stock_compile_fx, lambda: _joins)


def _routed(compile_fx: Callable[..., Any], asked: Callable[[], Set[str]]) -> Callable[..., Any]:
    @functools.wraps(compile_fx)
    def routed(model_, example_inputs_, inner_compile=None, *args, **kwargs):
        inner_compile = inner_compile or inductor.compile_fx_inner
        if routing.is_tracing():  # Inductor calls itself for the settings of a mode, and all is done already
            return compile_fx(model_, example_inputs_, inner_compile, *args, **kwargs)
        joins = asked()
        routing.note_rms_norms_elsewhere(model_)
        inner_compile = _compiling(joins)(inner_compile)
        with (
            _tagged(joins),
            routing.decompositions_replaced(folding.makes_any(joins)),
            config.patch(joint_custom_post_pass=folding.appended_to(config.joint_custom_post_pass, joins)),
        ):
            return rewriting.compiled(
                model_, lambda: compile_fx(model_, example_inputs_, inner_compile, *args, **kwargs), joins
            )

    return routed


@contextlib.contextmanager
def _compiling(joins: Set[str]) -> Iterator[None]:
    """The state for compiling a traced graph. A backward may be compiled long after tracing, on autograd's thread."""
    with _tagged(joins), routing.decompositions_restored():
        yield


def _tagged(joins: Set[str]) -> contextlib.AbstractContextManager:
    tag, own = torch.compiler.config.cache_key_tag, f"{_tag()}-{'-'.join(sorted(joins))};"
    return torch.compiler.config.patch(cache_key_tag=tag if own in tag else tag + own)


@functools.cache
def _tag() -> str:
    """A tag that differs between any two versions of these files, so that neither loads the other's graphs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"|fusednorm-{__version__}-{digest.hexdigest()[:12]}"
