"""The second pass: what is decided of each match, and where observers go."""
