"""column_sum, in the same layers as the norms: op, problem, plan, launch."""
