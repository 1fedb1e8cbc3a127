"""What trainable drafters grow from a target, and their losses."""
