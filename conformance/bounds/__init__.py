"""Values with bounds on their errors, and how ops and quantization carry them on."""
