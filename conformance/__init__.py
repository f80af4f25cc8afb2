"""The suite: every claim of a backend's config taken through the flow and judged, as pytest tests.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

import os

# Before torch is imported: threads that wait by spinning cost more than they give to cases as small as these.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
