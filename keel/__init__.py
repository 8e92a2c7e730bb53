"""The `keel` command and everything around a run: experiments, deployment, benchmarks."""
