"""PT2E: what a torchao Quantizer annotates, judged as a stage, and written as a config; `room` registers it."""
