"""Where workers come from: one protocol, an adapter per engine that places processes."""
