"""Other implementations, each optional: missing() -> the reason why it is not here, prepare(case, inputs) -> (forward,
backward) as `bench.candidates.Calls` has them. ADDS_RESIDUAL says that dx comes with the residual's gradient added.
Nothing of theirs is imported before it is asked for."""
