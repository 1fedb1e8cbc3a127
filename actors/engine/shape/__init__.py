"""The shape of decoding: its memory and time, and the choice of a shape by measurement."""
