"""Reports: everything a reader sees of a run, as pure functions of its results file.

Every report is generated from the results file (`reports.results`). Nothing here imports torch or another package.
"""

from fx_quant_conformance.former import check_name

check_name(__name__)
