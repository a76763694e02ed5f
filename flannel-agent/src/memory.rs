//! Memory that short work leaves behind.

/// Gives free memory back to the kernel. The allocator keeps what a thread or a burst of work has
/// freed, in case it comes again; what the loading of programs takes does not.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a call without conditions, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
