"""Programs that make pages and figures, count and measure; users have no need of them."""
