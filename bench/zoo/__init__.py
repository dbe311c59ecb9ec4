"""python -m bench.zoo: training steps of the models that people train, with stock norms and with ours."""
