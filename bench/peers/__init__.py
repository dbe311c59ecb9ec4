"""Other implementations, one module each. All are optional and are imported only when they are used.

missing() returns why the implementation cannot run here, or None. prepare(case, inputs) returns (forward, backward) as
in `bench.candidates.Calls`. ADDS_RESIDUAL says whether its backward adds the residual's gradient to dx itself.
"""
