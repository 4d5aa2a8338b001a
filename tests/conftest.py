"""One hypothesis profile for every test: the same examples each time, no time limits. One thread: tensors are small."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("qclip", derandomize=True, deadline=None, max_examples=60, print_blob=True)
settings.load_profile("qclip")
