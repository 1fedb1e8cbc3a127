"""Programs that make a page, count and measure. Users do not need them."""
