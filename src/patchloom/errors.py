"""The one exception that is meant for the user."""


class PatchloomError(Exception):
    """One clear sentence that says what is wrong and what to do; the command line prints it and exits with code 2."""
