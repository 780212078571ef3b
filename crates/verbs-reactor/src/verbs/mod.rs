//! RDMA through libibverbs, opened at run time.
