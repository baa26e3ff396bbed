"""Images: sources (`sources/`), decoding (`read`), splits, crops, colours, and batches on their way to the device."""
