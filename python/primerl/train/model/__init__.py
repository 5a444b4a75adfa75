"""The model: loaded, packed, proved to compute what `transformers` computes, and its FLOPs."""
