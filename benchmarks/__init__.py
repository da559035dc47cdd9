"""Side-by-side measurements. Each module is a command: `python -m benchmarks.NAME`."""
