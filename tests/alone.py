"""y of the plain forwards alone, as functional.py asks for it, for tensors that only the tests run kernels on."""

from __future__ import annotations

from fusednorm import autograd
from fusednorm.host import native


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    y = native.y_of("layer_norm_fwd", (x, normalized_shape, weight, bias, eps))
    return autograd.y_of("layer", x, normalized_shape, weight, bias, eps) if y is None else y


def rms_norm(x, normalized_shape, weight=None, eps=None):
    y = native.y_of("rms_norm_fwd", (x, normalized_shape, weight, eps))
    return autograd.y_of("rms", x, normalized_shape, weight, None, eps) if y is None else y
