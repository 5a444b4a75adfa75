"""The embedded engine over `transformers`: for architectures that the decoder in `inference.torch` does not know.

step       one call of the scheduler: tokens that come together are computed together
model      the model, loaded and proved; groups of sequences, each one forward pass
attention  of new tokens over what their sequences have in the cache
cache      keys, values and states of all sequences, as a cache of `transformers`
kernels    functions of layers with a state, by device and dtype
proof      tried at each start: a sequence in parts is computed as at once
weights    the model's memory under the names of a checkpoint
"""
