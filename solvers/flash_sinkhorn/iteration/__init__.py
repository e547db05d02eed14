"""Half-steps until the residual is met: `solve`."""
