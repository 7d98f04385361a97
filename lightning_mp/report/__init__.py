"""What is shown to a person: comparisons as a table, as files, and in Weights & Biases."""
