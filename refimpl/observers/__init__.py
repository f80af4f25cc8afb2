"""Numbers: ranges and qparams, observers and fake quantizes, quantize and dequantize as operators."""
