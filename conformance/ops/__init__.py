"""How each op that a pattern can name is built, called and varied."""
