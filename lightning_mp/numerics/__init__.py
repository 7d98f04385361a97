"""Number formats and the arithmetic of master weights, as functions of tensors."""
