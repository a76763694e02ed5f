//! The etcd subnet manager against a real etcd: the stories of specification §4.
//!
//! Ignored unless asked for: they need `etcd` at `/usr/bin/etcd` or where `FLANNEL_TEST_ETCD` says.

mod etcd_store {
    pub mod access;
    pub mod keeping;
    pub mod leasing;
    pub mod server;
    pub mod watching;
}
