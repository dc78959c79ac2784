"""Triton kernels of the engine's GPU path, one idea a file. Importing this package does not import Triton.

All of them run on the current stream, allocate only their outputs (and the workspaces made for them beforehand),
never synchronise, and may be captured in a CUDA graph: what changes from step to step is read on the device.

``pdl=True`` launches a kernel with programmatic dependent launch: it may become resident while the kernel before
it on the stream still runs, and waits on the device before it touches anything that another kernel wrote.
"""
