//! Asking the kernel whether a program can take merged packets out of the tunnel: whether
//! `bpf_skb_adjust_room` knows the flag that clears the tunnel's marks on them
//! (`BPF_F_ADJ_ROOM_DECAP_L4_UDP`). Only told so far, not used: decision 0021.

use aya::{Ebpf, TestRunOptions, programs::TestRun};

use super::object::{self, chain};

/// The program that tries it on a packet of ours.
const DECAP_PROBE: &str = "decap_probe";

/// Tries it.
///
/// # Errors
/// Why it cannot be tried.
pub(super) fn run(ebpf: &mut Ebpf) -> Result<bool, String> {
    let program = object::program(ebpf, DECAP_PROBE).map_err(|error| error.to_string())?;
    program.load().map_err(|error| chain(&error))?;
    let packet = packet();
    let options = TestRunOptions { data_in: Some(&packet), ..TestRunOptions::new() };
    let result = program.test_run(options).map_err(|error| chain(&error))?;
    Ok(result.return_value == 0)
}

/// A tunnel packet over IPv4 with an IPv4 packet of 40 bytes inside.
fn packet() -> Vec<u8> {
    const MACS: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let ip = |len: u8, protocol: u8| {
        [0x45, 0, 0, len, 0, 0, 0, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]
    };
    let mut packet = [&MACS[..], &[8, 0], &ip(90, 17)].concat();
    // UDP to VXLAN's port, without a checksum; VXLAN with VNI 1.
    packet.extend([0xc0, 0, 0x12, 0xb5, 0, 70, 0, 0]);
    packet.extend([8, 0, 0, 0, 0, 0, 1, 0]);
    packet.extend(MACS);
    packet.extend([8, 0]);
    packet.extend(ip(40, 253));
    packet.extend([7; 20]);
    packet
}
