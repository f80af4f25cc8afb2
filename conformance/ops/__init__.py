"""The record of each op that a pattern can name: how it is built, called and varied, and how it may be off."""
