"""Backends: the vendor contract, how a backend is found, and the shipped backends."""

from fx_quant_conformance.former import check_name

check_name(__name__)
