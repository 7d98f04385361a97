"""What training costs, as arithmetic over devices and tensors."""
