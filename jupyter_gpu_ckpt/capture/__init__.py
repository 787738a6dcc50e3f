"""Capture and restore of process trees: drives ``kernel-capture``, reads and edits its images.

Knows nothing of Jupyter and nothing of the store. Everything here raises
:class:`jupyter_gpu_ckpt.errors.CkptError` for what a user should be told.
"""
