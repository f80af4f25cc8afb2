"""Which arithmetic the kernels of a backend show: accumulators, rounding, the grid of biases."""
