"""pdgate beside other gateways: the same client, token clock and words, each over its native protocol."""
