"""Compiles a program's launch for any architecture without a GPU.

A launch need not be bound to tensors, because a build depends only on dtypes, alignment, integers that the kernel is
specialized for and compile-time constants. No other file calls the private functions by which Triton's JIT makes a
build.
"""

from __future__ import annotations

import hashlib

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import create_function_from_signature

from ..host.launcher import Launch
from ..planner.budget import WARP_SIZE


class UnknownTriton(ImportError):
    """The installed Triton's JIT lacks a name that this file uses, or takes other arguments."""


def compile_for(launch: Launch, arch: int):
    """Triton's compiled kernel of `launch` for compute capability arch / 10 (90 is sm_90)."""
    source, target, options = _source(launch, arch)
    return triton.compile(source, target=target, options=options.__dict__)


def is_built(launch: Launch, arch: int) -> bool:
    """Whether the build is in Triton's on-disk cache."""
    source, target, options = _source(launch, arch)
    backend = make_backend(target)
    options = backend.parse_options({**options.__dict__, **source.parse_options()})
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})


def build_key(launch: Launch, arch: int) -> str:
    """A key that two launches share if and only if one build serves both."""
    source, _, options = _source(launch, arch)
    return f"{source.hash()}-{options.hash()}"


def _source(launch: Launch, arch: int):
    """(source, target, options) of the build, derived from the arguments as Triton's launch does. Raises
    UnknownTriton."""
    try:
        return _as_tritons_launch(launch, arch)
    except (AttributeError, TypeError) as error:
        raise UnknownTriton(f"Triton {triton.__version__} compiles in another way than is known: {error}") from error


def _as_tritons_launch(launch: Launch, arch: int):
    target = GPUTarget("cuda", arch, WARP_SIZE)
    backend = make_backend(target)
    kernel = launch.kernel
    keywords = launch.keywords()
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return source_type(kernel, signature, constants, attributes), target, options
