"""Norms with a gate, forward and backward, as calls, and what they must give."""

from __future__ import annotations

from cases import BF16, FP16, FP32
from steps import Steps

from fusednorm.forms import FormSpec

BEFORE = FormSpec(combine="gate")
BEFORE_BY_SIGMOID = FormSpec(combine="gate", activation="sigmoid", weight_offset=1.0)
AFTER = FormSpec(finish="gate")
AFTER_BY_SIGMOID = FormSpec(finish="gate", activation="sigmoid", weight_offset=1.0)
AFTER_ROUNDED = FormSpec(finish="gate", rounds_x_hat=True)
BEFORE_BY_GROUP, AFTER_BY_GROUP = FormSpec(combine="gate", groups=4), FormSpec(finish="gate", groups=2)
FORMS = [BEFORE, BEFORE_BY_SIGMOID, AFTER, AFTER_BY_SIGMOID]

# Rows and columns that end within a tile, dtypes, layouts, and gradients that are not wanted.
PORTABLE = [
    Steps("layer", AFTER, 9, 77),
    Steps("rms", AFTER, 8, 64, other=FP32, layout="row_strided"),
    Steps("rms", AFTER_BY_SIGMOID, 8, 72, layout="heads_first", parameters=None),
    Steps("layer", AFTER_BY_SIGMOID, 9, 64, FP16, added=FP32),
    Steps("rms", AFTER_ROUNDED, 9, 77, parameters=BF16),
    Steps("layer", AFTER_ROUNDED, 8, 64, FP16, other=FP16),
    Steps("layer", AFTER, 9, 40, mask=(False, True, True, False)),
    Steps("rms", BEFORE, 9, 77, FP32, other=FP16),
    Steps("layer", BEFORE, 8, 64, layout="packed_slice", mask=(False, True, True, True)),
    Steps("rms", BEFORE_BY_SIGMOID, 8, 72, mask=(True, False, False, False), added=BF16),
    Steps("layer", BEFORE_BY_SIGMOID, 9, 64, mask=(False, True, False, False)),
    Steps("rms", BEFORE_BY_GROUP, 9, 160),
    Steps("layer", AFTER_BY_GROUP, 8, 154, FP32, layout="row_strided"),
    Steps("layer", BEFORE_BY_GROUP, 8, 256, layout="heads_first", mask=(True, True, False, False), added=FP32),
    Steps("layer", AFTER_BY_GROUP, 9, 80, mask=(False, True, True, False)),
    Steps("rms", BEFORE_BY_GROUP, 9, 80, places=(160, 0, 80)),
    Steps("layer", AFTER, 9, 77, FP32, other=FP32, places=(170, 90, 3)),
    Steps("rms", AFTER, 8, 64, places=(200, 8, 104), mask=(False, True, True, False)),
]
# More rows than a ring holds at once; a tail; masked and whole rows; clusters (of 2 SMs each).
PIPELINED = [
    Steps("rms", AFTER, 60, 200),
    Steps("layer", AFTER, 9, 1032, parameters=BF16, added=BF16),
    Steps("rms", BEFORE, 36, 1536, layout="row_strided"),
    Steps("layer", BEFORE_BY_SIGMOID, 36, 256, FP32, other=BF16, mask=(True, True, False, False)),
    Steps("layer", AFTER_BY_SIGMOID._replace(groups=2), 3, 10240, mask=(False, True, True, True)),
    Steps("rms", BEFORE_BY_GROUP, 60, 800),
    Steps("layer", AFTER_BY_GROUP, 9, 2064, parameters=BF16, added=BF16),
    Steps("rms", BEFORE, 37, 1536, places=(3088, 1544, 0)),
]
SPECIALIZED = [Steps("layer", AFTER, 60, 200), Steps("rms", BEFORE, 37, 1032, added=FP32)]
