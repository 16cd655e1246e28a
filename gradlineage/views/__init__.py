"""Ways to look at a lineage. Each is a function of a `Lineage` and nothing else, over the shared rows of `rows`; none needs torch."""
