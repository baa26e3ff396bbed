"""Image data: sources, decoding, splits, augmentation, and batches on a device."""
