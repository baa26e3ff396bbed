"""Images with annotations of their parts: a class for each pixel, or boxes and masks of objects."""
