"""The drafters propose the tokens that the target verifies. Each has a file here and a line in the registry."""
