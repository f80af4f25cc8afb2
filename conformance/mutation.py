"""Gone: the mutation gate is test code, and runs in a checkout."""

import sys

print("conformance.mutation is gone: run `python -m tests.mutation` in a checkout of the suite", file=sys.stderr)
sys.exit(4)
