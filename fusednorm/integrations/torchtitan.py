"""torchtitan on this package's norms, by its overrides: nothing in torchtitan changes.

    --override.imports fusednorm.integrations.torchtitan.rms_norm fusednorm.integrations.torchtitan.layer_norm

Checkpoints, shardings and names stay those of the stock norms. `save_norms`, a third override, has selective activation
checkpointing keep what a norm's forward computed; without it the backward computes it again, as with torchtitan's own
norms. Norms of subclasses stay as they are.
"""

from dataclasses import dataclass

import spmd_types
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common import nn_modules

from .. import modules
from ..autograd import NormFunction
from ..namespace import TORCH_OPS

# For models that call LayerNormFunction or RMSNormFunction themselves while torchtitan checks sharding types. Local is
# the checker's word for a function in which no rank waits for another. Modules and functionals need no entry.
spmd_types.register_local_autograd_function(NormFunction)


class LayerNorm(modules.LayerNorm, nn_modules.LayerNorm):
    """torchtitan's LayerNorm on our kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.LayerNorm.Config):
        pass


class RMSNorm(modules.RMSNorm, nn_modules.RMSNorm):
    """torchtitan's RMSNorm on our kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        pass


class SavesNorms(SelectiveAC):
    """Selective activation checkpointing that keeps the outputs of our forwards."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {TORCH_OPS.layer_norm_fwd.default, TORCH_OPS.rms_norm_fwd.default}


@override(target=nn_modules.LayerNorm.Config, exact=True, description="LayerNorm on fusednorm's kernels")
def layer_norm(config: nn_modules.LayerNorm.Config) -> LayerNorm.Config:
    return derive(config, LayerNorm.Config)


@override(target=nn_modules.RMSNorm.Config, exact=True, description="RMSNorm on fusednorm's kernels")
def rms_norm(config: nn_modules.RMSNorm.Config) -> RMSNorm.Config:
    return derive(config, RMSNorm.Config)


@override(target=SelectiveAC.Config, exact=True, description="keep what fusednorm's forwards computed")
def save_norms(config: SelectiveAC.Config) -> SavesNorms.Config:
    return derive(config, SavesNorms.Config)
