"""How far a quantized model is from the float one."""
