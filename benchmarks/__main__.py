"""`python -m benchmarks` is now `keel bench`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("benchmarks", "bench")
