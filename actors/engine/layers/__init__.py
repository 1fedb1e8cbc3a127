"""A model's layers as the engine runs them."""
