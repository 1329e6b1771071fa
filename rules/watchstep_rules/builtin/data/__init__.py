"""Rules over inputs, labels and trees."""
