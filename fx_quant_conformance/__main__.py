# PYTHON_ARGCOMPLETE_OK
"""``python -m fx_quant_conformance``: the console command, where its folder is not on the path."""

# ruff: noqa: E402
import os
import sys

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__" and os.getcwd() != _HERE:
    # Python looks for modules in the current folder, which may be a certificate's: nothing is imported from there.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.getcwd()]

from fx_quant_conformance.door import main

if __name__ == "__main__":
    sys.exit(main())
