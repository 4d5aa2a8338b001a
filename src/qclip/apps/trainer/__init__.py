"""``qclip train``: settings, the run that follows from them, its loop, and what is shown meanwhile.

`qclip.apps.trainer.settings` does not import torch, so that the command line stays quick.
"""
