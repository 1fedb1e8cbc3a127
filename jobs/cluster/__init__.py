"""Commands sent to a Ray cluster."""
