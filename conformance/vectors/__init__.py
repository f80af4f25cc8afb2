"""Vectors: models, inputs and the integers that are right, as files, for a device that cannot run Python."""
