"""The plan over kept tile pairs as an operator, what it costs, and values that autograd differentiates."""
