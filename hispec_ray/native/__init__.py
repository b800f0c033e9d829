"""CPU kernels in C++, built for the machine they run on; knows nothing of the other rooms."""
