"""``python -m fx_quant_conformance``: the console command, where its folder is not on the path."""

from __future__ import annotations

import sys

from fx_quant_conformance.door import main

if __name__ == "__main__":
    sys.exit(main())
