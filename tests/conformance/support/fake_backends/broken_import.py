"""A vendor's module that does not import."""

raise ImportError("libnpu.so: cannot open shared object file")
