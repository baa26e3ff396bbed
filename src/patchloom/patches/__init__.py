"""Pure functions of patches and their positions, without parameters."""
