//! Counting, each CPU for itself.

use aya_ebpf::btf_maps::PerCpuArray;
use flannel_common::map::Counters;

/// Adds a packet, merged from `segments`, to a counter of this CPU.
#[inline(always)]
pub fn add<const N: usize>(map: &PerCpuArray<Counters, N>, index: u32, segments: u32, len: u32) {
    let Some(counters) = map.get_ptr_mut(index) else { return };
    // SAFETY: this CPU's own slot, and nothing else of ours runs on this CPU in between.
    let counters = unsafe { &mut *counters };
    *counters = counters.plus(Counters { packets: u64::from(segments), bytes: u64::from(len) });
}
