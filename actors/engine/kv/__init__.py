"""The keys and values of sequences: pages, attention over them, and the model that reads and writes them."""
