"""The parts that use Ray."""
