"""Imported first by the process from which a run's processes are made: what they load is compiled from its sources.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from fx_quant_conformance.conformance.machine.bytecode import compile_sources

compile_sources()
