"""Data: image sources, partitions over clients, and augmentation of batches."""
