"""``export``: an encoder for use without patchloom, in the forms of other libraries, each of which is loaded back."""
