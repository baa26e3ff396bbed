"""The exceptions that are meant for the user."""


class PatchloomError(Exception):
    """One clear sentence that says what is wrong and what to do; the command line prints it and exits with code 2."""


class Stopped(PatchloomError):
    """Somebody stopped a run, and nothing is lost; the command line exits with code 130."""


class AlreadyReported(PatchloomError):
    """What another process of the same training has reported already; the command line prints nothing."""
