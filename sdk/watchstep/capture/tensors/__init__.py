"""Full tensors: at which steps they are saved, their memory, and the thread that writes them."""
