"""The third pass: a prepared model becomes a reference model."""
