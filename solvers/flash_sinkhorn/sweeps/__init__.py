"""One half-step over all pairs, on either device."""
