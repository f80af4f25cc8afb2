"""The mutation gate: which faults the suite finds, by which check, and how small they may be.

``python -m tests.mutation`` runs backends with one seeded fault each (tests/mutants) through the unchanged suite
(docs/detection-power.md).
"""
