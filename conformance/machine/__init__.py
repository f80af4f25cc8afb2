"""The process, the CPU and the memory: what isolates a claim, and what its result depends on."""
