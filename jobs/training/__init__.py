"""Training drafters on finished jobs."""
