"""The four engines of ``torch.backends.quantized``, with their tables, waivers and baselines.

They are run as long as torch has them, and can be cut off with ``refimpl/lower``: nothing else needs the two.
"""
