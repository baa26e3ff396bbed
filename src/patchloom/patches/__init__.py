"""Pure functions of patches and their positions; nothing here has parameters."""
