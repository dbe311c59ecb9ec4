"""One bench tool: `python -m bench.bench_norm`."""
