"""Tests of models that a user hands in."""
