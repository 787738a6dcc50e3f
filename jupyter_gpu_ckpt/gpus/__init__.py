"""This node's NVIDIA GPUs, and whether a state's GPU memory fits onto them.

No process of the server loads a library of NVIDIA's: :mod:`.nvml` is run as a program.
"""
