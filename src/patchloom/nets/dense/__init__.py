"""What turns an encoder's tokens into maps, and maps into a class for each pixel, or into boxes and masks."""
