"""Reports: everything a reader sees of a run, as pure functions of its results file.

The results file (`reports.results`) is the one truth; nothing here imports torch or the other packages.
"""
