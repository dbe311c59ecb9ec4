"""The commands of `python -m fusednorm`, and the public functions explain and warmup."""
