"""What a job is."""
