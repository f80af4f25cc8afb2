"""What a torchao Quantizer annotates, read off the models that torchao prepares by it."""
