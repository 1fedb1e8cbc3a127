"""What touches Ray."""
