"""Data: sources of images, how they are split over clients, and augmentation on tensors."""
