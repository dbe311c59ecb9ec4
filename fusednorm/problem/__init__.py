"""A call of a norm: its operands checked, and described as a value."""
