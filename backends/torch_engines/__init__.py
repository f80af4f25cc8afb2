"""The four engines of ``torch.backends.quantized``, with their tables, waivers and baselines.

They are run as long as torch has them. With ``refimpl/lower`` they are what goes with it; of these two,
the rest uses the tables, as configs of the backend ``reference``, and ``convert_fx``.
"""
