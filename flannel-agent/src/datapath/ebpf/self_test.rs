//! Asking the kernel whether encapsulation and decapsulation work, before any packet depends on
//! it: versions tell little, distributions take features back.

use aya::{Ebpf, TestRunOptions, programs::TestRun};

use super::{EbpfError, object};

/// The program that tries it on a packet of ours.
pub(super) const SELF_TEST: &str = "self_test";

/// What the steps of the program are for.
const STEPS: [&str; 6] = [
    "reading the packet",
    "making room for headers",
    "the length with headers",
    "taking headers away",
    "the length without headers",
    "the packet as it was",
];

/// Tries both families.
///
/// # Errors
/// A sentence about what this kernel cannot do.
pub(super) fn run(ebpf: &mut Ebpf) -> Result<(), EbpfError> {
    let program = object::program(ebpf, SELF_TEST)?;
    for (family, packet) in [("IPv4", packet_v4()), ("IPv6", packet_v6())] {
        let options = TestRunOptions { data_in: Some(&packet), ..TestRunOptions::new() };
        let result = program
            .test_run(options)
            .map_err(|error| EbpfError::SelfTest(format!("{family}: {}", object::chain(&error))))?;
        if result.return_value != 0 {
            let step = usize::try_from(result.return_value).unwrap_or_default();
            let what = STEPS.get(step.wrapping_sub(1)).unwrap_or(&"the program");
            return Err(EbpfError::SelfTest(format!("{family}: {what} failed")));
        }
    }
    Ok(())
}

/// An Ethernet frame with an IPv4 header and 40 bytes.
fn packet_v4() -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    packet.extend([0x45, 0, 0, 60, 0, 0, 0, 0, 64, 253, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
    packet.extend([7; 40]);
    packet
}

/// The same with IPv6.
fn packet_v6() -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd];
    packet.extend([0x60, 0, 0, 0, 0, 40, 253, 64]);
    packet.extend([1; 32]);
    packet.extend([7; 40]);
    packet
}
