"""Examples that run as they stand, from the root of a checkout."""
