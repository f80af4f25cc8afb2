"""The exact result of a reference model, and the derived error bound of a right backend."""
