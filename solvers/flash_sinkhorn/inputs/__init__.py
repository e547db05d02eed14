"""Every refusal names the argument and the fix; one look at the values."""
