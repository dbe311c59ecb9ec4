"""python -m bench is python -m bench.bench_norm."""

import sys

from .bench_norm import main

sys.exit(main())
