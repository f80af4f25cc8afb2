"""Exported programs: a reference model as one, and prepare's decisions as annotations of one."""
