"""What the encoder may know of a batch: pure functions of tensors, without parameters."""
