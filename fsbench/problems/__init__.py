"""Problem families: `name(*, n, m, d, eps, seed, **params) -> Clouds`, one file a family.

Points and weights are float64 numpy arrays that depend on sizes, seed and params only, never on eps or the solver;
eps is there for the closed form. A size that a family cannot have raises ValueError naming the argument.
"""
