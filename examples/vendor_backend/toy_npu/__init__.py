"""An imaginary vendor's package: a small int8 machine, its compiler, and its claims (see README.md)."""
