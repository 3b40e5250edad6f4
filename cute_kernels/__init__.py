"""Device kernels: one file is one kernel for one architecture; ``common`` holds what they share."""
