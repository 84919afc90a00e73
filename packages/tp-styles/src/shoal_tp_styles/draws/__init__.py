"""Random numbers between styles are those of one device: layouts of local tensors are followed to where code draws."""
