"""torchao's Quantizers on the bench: what they annotate, and torchao's own work around it."""
