"""The class DTensor: autograd, gradients of parameters, indexing and serialization."""
