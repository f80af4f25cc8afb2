"""What a torchao Quantizer amounts to, as a BackendConfig."""
