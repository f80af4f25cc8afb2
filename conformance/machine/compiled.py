"""Imported first by the process from which a run's processes are made: what they load is compiled from its sources."""

from conformance.machine.bytecode import compile_sources

compile_sources()
