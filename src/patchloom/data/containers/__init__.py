"""Files that hold more than one image: slides, stacks, volumes and films."""
