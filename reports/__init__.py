"""Reports: everything a reader sees of a run, as pure functions of its results file.

Every report is generated from the results file (`reports.results`). Nothing here imports torch or another package.
"""
