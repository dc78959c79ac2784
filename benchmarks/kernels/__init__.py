"""The GPU kernels one by one and as a chain of layers, in CUDA graphs, over buffers that no cache can hold.

    python -m benchmarks.kernels [--parts decode,linear,…] [--sweep] [--output FILE]

Shapes are those of Llama-3.1-8B in bfloat16. Each time is the median of several replays of a graph that calls the
kernel on one buffer set after the other. Bytes are those that must be moved at least once.
``--sweep`` tries every launch configuration instead of the chosen ones; ``--warm I/N`` only compiles a share of them.

Two parts compare with what else there is, and run only if asked for: ``linear_lt`` sets the linear layers beside
cuBLASLt's algorithms, ``layer_compile`` a decoder layer beside the same layer through ``torch.compile``.
"""
