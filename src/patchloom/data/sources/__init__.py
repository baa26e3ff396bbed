"""Where images come from, one file a kind; `open` tells by what the user typed which of them it is."""
