"""Attacks: odd rows, files, outputs, models and requests, as tables. The next attack is one more line."""
