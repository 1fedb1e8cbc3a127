"""Submits commands to a Ray cluster and follows them."""
