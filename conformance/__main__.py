"""What ``python -m conformance`` of release 0.2.0 says now, in a checkout."""

import sys

if __name__ == "__main__":
    print("python -m conformance is gone: fx-quant-conformance COMMAND has its commands", file=sys.stderr)
    sys.exit(4)
