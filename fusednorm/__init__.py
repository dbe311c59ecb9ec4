"""LayerNorm and RMSNorm, forward and backward, as registered PyTorch ops with Triton kernels for NVIDIA GPUs.

Importing this package registers torch.ops.fusednorm.*. It imports no Triton and does not initialize CUDA.
"""

import importlib
import pathlib
from typing import TYPE_CHECKING

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    # With this package's own name as the error's, `python -m fusednorm` prints the sentence without a traceback.
    raise ImportError("fusednorm needs PyTorch 2.11 or later, found none: pip install torch", name=__name__) from None

_HERE = pathlib.Path(__file__).parent
if not (_HERE / "kernels").is_dir():
    # A source tree has kernels/ beside this package, an installation has it inside. Both import as fusednorm.kernels.
    __path__.append(str(_HERE.parent))

from . import functional, layers  # noqa: E402
from .autograd import LayerNormFunction, RMSNormFunction  # noqa: E402
from .columns.explanation import explain_column_sum  # noqa: E402
from .columns.ops import column_sum  # noqa: E402
from .functional import (  # noqa: E402
    ada_layer_norm,
    ada_rms_norm,
    add_layer_norm,
    add_rms_norm,
    affine_layer_norm,
    affine_rms_norm,
    layer_norm_add,
    layer_norm_gated,
    rms_norm_add,
    rms_norm_gated,
)
from .heads.explanation import explain_qk_norm, explain_qk_norm_packed  # noqa: E402
from .heads.functional import qk_norm, qk_norm_packed  # noqa: E402
from .heads.modules import QKNorm  # noqa: E402
from .modules import (  # noqa: E402
    AdaLayerNorm,
    AdaRMSNorm,
    AddLayerNorm,
    AddRMSNorm,
    AffineLayerNorm,
    AffineRMSNorm,
    LayerNorm,
    LayerNormAdd,
    LayerNormGated,
    RMSNorm,
    RMSNormAdd,
    RMSNormGated,
)
from .nodes.packed import layer_norm_gated_packed, rms_norm_gated_packed  # noqa: E402
from .nodes.sandwich import layer_norm_add_layer_norm, rms_norm_add_rms_norm  # noqa: E402
from .settings.forcing import force  # noqa: E402
from .settings.invariance import batch_invariant  # noqa: E402
from .settings.margin import sm_margin  # noqa: E402
from .tools.explanation import explain  # noqa: E402
from .tools.warm import warmup  # noqa: E402
from .tools.warm_heads import warmup_qk_norm, warmup_qk_norm_packed  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AdaLayerNorm", "AdaRMSNorm", "AddLayerNorm", "AddRMSNorm", "AffineLayerNorm", "AffineRMSNorm", "LayerNorm",
    "LayerNormAdd", "LayerNormGated", "LayerNormFunction", "QKNorm", "RMSNorm", "RMSNormAdd", "RMSNormGated",
    "RMSNormFunction", "ada_layer_norm", "ada_rms_norm", "add_layer_norm", "add_rms_norm", "affine_layer_norm",
    "affine_rms_norm", "batch_invariant", "column_sum", "explain", "explain_column_sum", "explain_qk_norm",
    "explain_qk_norm_packed", "force", "functional", "layer_norm_add", "layer_norm_add_layer_norm", "layer_norm_gated",
    "layer_norm_gated_packed", "layers", "qk_norm", "qk_norm_packed", "rms_norm_add", "rms_norm_add_rms_norm",
    "rms_norm_gated", "rms_norm_gated_packed", "sm_margin", "warmup", "warmup_qk_norm", "warmup_qk_norm_packed",
]  # fmt: skip

# Imported on first use: integrations rely on private names of PyTorch, and the rest must work where these are gone.
_INTEGRATIONS = {
    "disable_eager": "aten",
    "disable_inductor": "inductor",
    "enable_eager": "aten",
    "enable_inductor": "inductor",
    "patch_model": "models",
}


if TYPE_CHECKING:
    from .integrations.aten import disable_eager as disable_eager
    from .integrations.aten import enable_eager as enable_eager
    from .integrations.inductor import disable_inductor as disable_inductor
    from .integrations.inductor import enable_inductor as enable_inductor
    from .integrations.models import patch_model as patch_model
else:

    def __getattr__(name: str):
        if name == "integrations":
            return importlib.import_module(".integrations", __name__)
        if name not in _INTEGRATIONS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f".integrations.{_INTEGRATIONS[name]}", __name__)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"fusednorm.{name} does not know this torch, everything else works: {error}") from error
        return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTEGRATIONS, "integrations"})
