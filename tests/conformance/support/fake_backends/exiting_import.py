"""A vendor's module that ends the process when it is imported."""

import sys

sys.exit("this is a script")
