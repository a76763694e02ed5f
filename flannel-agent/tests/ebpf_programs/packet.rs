//! Tunnel packets, as a peer would send them.

use std::net::IpAddr;

pub const VNI: u32 = 0x0001_0203;
pub const PORT: u16 = 8472;
/// Where UDP begins in a packet without options.
pub const UDP_V4: usize = 14 + 20;
pub const UDP_V6: usize = 14 + 40;

/// What can be odd about a packet.
pub struct Shape {
    pub source: IpAddr,
    pub port: u16,
    pub vni: u32,
    pub flags: u8,
    /// IPv4 options; a multiple of four bytes.
    pub options: usize,
    /// IPv4 flags and fragment offset.
    pub fragment: u16,
    pub inner_len: u16,
}

impl Shape {
    pub fn from(source: &str) -> Self {
        Self {
            source: source.parse().expect("an address"),
            port: PORT,
            vni: VNI,
            flags: 8,
            options: 0,
            fragment: 0x4000,
            inner_len: 84,
        }
    }

    /// The bytes. The destination MAC is zero, as that of the device of a test run.
    pub fn packet(&self) -> Vec<u8> {
        let udp_len = 16 + self.inner_len;
        let mut packet = vec![0; 12];
        match self.source {
            IpAddr::V4(source) => {
                let header = 20 + self.options;
                packet.extend([0x08, 0x00]);
                packet.extend([0x40 | u8::try_from(header / 4).expect("fits"), 0]);
                let total = u16::try_from(header).expect("fits") + udp_len;
                packet.extend(total.to_be_bytes());
                packet.extend([0, 0]);
                packet.extend(self.fragment.to_be_bytes());
                packet.extend([64, 17, 0, 0]);
                packet.extend(source.octets());
                packet.extend([192, 0, 2, 1]);
                // No operation.
                packet.resize(packet.len() + self.options, 1);
            }
            IpAddr::V6(source) => {
                packet.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                packet.extend(udp_len.to_be_bytes());
                packet.extend([17, 64]);
                packet.extend(source.octets());
                packet.extend([0; 16]);
            }
        }
        packet.extend([0xc0, 0]);
        packet.extend(self.port.to_be_bytes());
        packet.extend(udp_len.to_be_bytes());
        packet.extend([0, 0, self.flags, 0, 0, 0]);
        packet.extend((self.vni << 8).to_be_bytes());
        packet.resize(packet.len() + usize::from(self.inner_len), 0);
        packet
    }
}
