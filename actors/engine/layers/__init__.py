"""How the engine runs a model's layers."""
