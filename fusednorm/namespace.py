"""The namespace of the registered ops: torch.ops.fusednorm, for a package imported as fusednorm.

A copy of this package that is imported under another name registers its ops under that name. Several copies therefore
work in one process, as Hugging Face's `kernels` requires of the builds that it loads.
"""

import torch

NAMESPACE = __package__.replace(".", "_")
TORCH_OPS = getattr(torch.ops, NAMESPACE)
