"""``qclip audit``: the attempts to break qclip that the command line runs, and the same against faults of others."""
