"""Per-example gradients in factored form: their norms, factors and clipped sums."""
