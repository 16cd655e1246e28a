"""What gradlineage costs. One file asks one question; ``python -m benchmarks`` asks them all. See README.md."""
