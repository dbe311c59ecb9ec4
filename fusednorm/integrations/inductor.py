"""torch.compile: norms of an unmodified model run this package's kernels in the graphs that Inductor compiles.

`enable_inductor()` puts a wrapper in the place of Inductor's entry point. For the duration of a compilation, and in its
thread only, the wrapper

- replaces the decompositions of the norms, which AOTAutograd applies as it traces forward and backward (routing.py);
- adds the pass over the joint graph that folds casts and residual gradients into the backward ops, after what the user
  has there (folding.py);
- adds a tag to the keys of all compile caches. These know nothing of decompositions: without the tag a process would
  load what another one compiled with, or without, this package.

Outside of compilations everything is as it was. Importing this module imports Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import compile_fx as inductor
from torch._inductor import config

from .. import __version__
from . import folding, routing
from .routing import Entry, Report, report

__all__ = ["Entry", "Report", "compile_graph", "disable_inductor", "enable_inductor", "report"]

# What else torch does not promise to keep. Where it is gone, importing fails, not a compilation.
_Settings = torch._TorchCompileInductorWrapper
for _module, *_names in (
    (inductor, "compile_fx", "compile_fx_inner"),
    (config, "joint_custom_post_pass"),
    (torch.compiler.config, "cache_key_tag"),
    (routing.decomposition, "decompositions", "fast_random_decomps"),
):
    for _name in _names:
        getattr(_module, _name)
_stock_compile_fx: Callable[..., Any] | None = None  # Inductor's own, while ours is in its place


class enable_inductor:  # noqa: N801  reads as a function: with enable_inductor(): ...
    """Let torch.compile's default backend run the norms of unmodified models on this package's kernels.

    nn.LayerNorm, nn.RMSNorm, F.layer_norm and F.rms_norm of CUDA tensors become layer_norm_bwd and rms_norm_bwd in
    backward graphs. Forwards stay with Inductor, which fuses them with their neighbours, except for very wide rows.
    fusednorm.integrations.inductor.report() says what went where, and why.

    Holds until disable_inductor(); as a context manager, until its end, which restores what was before. Enabling twice
    is enabling once. What is compiled already stays as it is until torch._dynamo.reset().
    """

    def __init__(self) -> None:
        self._was_enabled = _stock_compile_fx is not None
        _enable()

    def __enter__(self) -> enable_inductor:
        return self

    def __exit__(self, *_) -> None:
        if self._was_enabled:
            _enable()
        else:
            disable_inductor()


def disable_inductor() -> None:
    """Undo enable_inductor(), however often it was called. Compiled graphs stay until torch._dynamo.reset()."""
    global _stock_compile_fx
    if _stock_compile_fx is not None:
        inductor.compile_fx = _stock_compile_fx
        _stock_compile_fx = None


def compile_graph(graph: torch.fx.GraphModule, inputs: list, *, mode: str | None = None, options: dict | None = None):
    """The backend of torch.compile(model, backend="fusednorm"): Inductor as under enable_inductor(), for this model.

    mode and options are those that torch.compile takes for Inductor.
    """
    settings = _Settings(mode or "default", options, None).config
    compile_fx = _routed(_stock_compile_fx or inductor.compile_fx)
    with config.patch(settings):
        return compile_fx(graph, inputs, config.patch(settings)(inductor.compile_fx_inner))


def _enable() -> None:
    global _stock_compile_fx
    if _stock_compile_fx is None:
        _stock_compile_fx = inductor.compile_fx
        inductor.compile_fx = _routed(_stock_compile_fx)


def _routed(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_fx)
    def routed(model_, example_inputs_, inner_compile=None, *args, **kwargs):
        inner_compile = _compiling()(inner_compile or inductor.compile_fx_inner)
        with (
            _tagged(),
            routing.decompositions_replaced(),
            config.patch(joint_custom_post_pass=folding.appended_to(config.joint_custom_post_pass)),
        ):
            return compile_fx(model_, example_inputs_, inner_compile, *args, **kwargs)

    return routed


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """For a graph that has been traced: its backward perhaps long after, on a thread of autograd's."""
    with _tagged(), routing.decompositions_restored():
        yield


def _tagged() -> contextlib.AbstractContextManager:
    tag = torch.compiler.config.cache_key_tag
    return torch.compiler.config.patch(cache_key_tag=tag if _tag() in tag else tag + _tag())


@functools.cache
def _tag() -> str:
    """Different for any two versions of these rules, so that neither loads what the other compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"|fusednorm-{__version__}-{digest.hexdigest()[:12]}"
