"""Choosing tokens: sampling by shared noise, and the constraints on what may come."""
