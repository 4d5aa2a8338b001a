"""Applications of the library: command line, data sets, trainer, reports, benchmarks and experiments."""
