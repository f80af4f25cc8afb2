"""The process, the CPU and the memory: what isolates a claim, and what its result depends on.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""
