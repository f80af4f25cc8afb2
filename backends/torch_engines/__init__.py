"""The four engines of ``torch.backends.quantized``, with their tables, waivers and baselines.

They are run as long as torch has them, and go with it, as ``refimpl/lower`` does. Only the tables are used elsewhere:
as configs of the backend ``reference``.
"""
