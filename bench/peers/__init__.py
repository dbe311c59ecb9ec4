"""Other implementations, each optional: missing() -> the reason why it is not here, prepare(case, inputs) -> (forward,
backward) as `bench.candidates.Calls` has them. Nothing of theirs is imported before it is asked for."""
