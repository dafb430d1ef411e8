"""Matrix products, dense and scaled."""
