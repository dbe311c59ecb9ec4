"""axolotl on this package's norms, by a line of its YAML: nothing in axolotl changes.

    plugins:
      - fusednorm.integrations.axolotl.Plugin
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin
from torch import nn

from .models import patch_model

LOG = logging.getLogger("axolotl.fusednorm")  # axolotl shows what loggers below its own say


class Plugin(BasePlugin):
    """Calls patch_model on the model that axolotl has built, before adapters wrap it and before it is sharded or
    compiled. The log says which norms run our kernels now, and why others do not."""

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        LOG.info("fusednorm: %s", patch_model(model))
