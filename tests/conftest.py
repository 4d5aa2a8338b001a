"""One hypothesis profile for every test: the same examples each time, and no time limits."""

from hypothesis import settings

settings.register_profile("qclip", derandomize=True, deadline=None, max_examples=60, print_blob=True)
settings.load_profile("qclip")
