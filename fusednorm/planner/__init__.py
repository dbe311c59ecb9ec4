"""Which kernel runs a problem on a device, and with what: pure functions of values, without a GPU."""
