"""Values that autograd differentiates."""
