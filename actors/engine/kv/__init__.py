"""Keys and values of sequences: pages, attention over pages, and the models that read and write them."""
