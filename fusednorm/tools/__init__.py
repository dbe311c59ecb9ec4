"""The commands of `python -m fusednorm`, and what people ask for by name: explain and warmup."""
