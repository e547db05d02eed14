"""The plan as an operator, and its derivatives."""
