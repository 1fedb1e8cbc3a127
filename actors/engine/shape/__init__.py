"""The shape of decoding: what it takes in memory and in time, and choosing it by measurement."""
