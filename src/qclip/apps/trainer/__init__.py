"""``qclip train``: settings, the run that follows from them, its loop and its screen.

`qclip.apps.trainer.settings` does not import torch, so that the command line stays quick.
"""
