"""The fourth pass: a reference model becomes one of the quantized ops of torch's engines."""
