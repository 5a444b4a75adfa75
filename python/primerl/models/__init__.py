"""Model folders made from a config, for demos and tests that download nothing."""
