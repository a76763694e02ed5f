//! The vxlan backend's options in the network configuration (specification §7.1).

use crate::{
    backend::BackendError,
    go_json::{GoJsonError, Object},
    lease::RawJson,
};

/// The kernel's default port for VXLAN, which flannel uses: 8472, not RFC 7348's 4789.
pub const DEFAULT_PORT: u16 = 8472;

/// Largest VNI: 24 bits (RFC 7348 §5).
const MAX_VNI: u64 = 0xff_ffff;

/// Smallest MTU the underlay may be said to have: IPv4's minimum for hosts plus the overhead.
const MIN_MTU: u64 = 576;

/// The options that can be changed while packets flow: the kernel changes the device in place, or
/// it is a matter of routes. The others would need another device, and every peer to have it.
pub const CHANGEABLE: &[&str] = &["MTU", "Learning", "DirectRouting"];

/// Options of `Backend` for type `vxlan`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VxlanOptions {
    /// VXLAN network identifier.
    pub vni: u32,
    /// UDP port, ours and every peer's.
    pub port: u16,
    /// MTU of the underlay in bytes, if it is not the external interface's.
    pub mtu: Option<u32>,
    /// Group policy extension in the header.
    pub gbp: bool,
    /// Whether the kernel device learns forwarding entries from what it receives.
    pub learning: bool,
    /// Whether peers on the same link get a plain route instead of the tunnel.
    pub direct_routing: bool,
}

impl VxlanOptions {
    /// Reads the options.
    ///
    /// # Errors
    /// [`BackendError::Config`] naming the field and the value.
    pub fn parse(backend: &RawJson) -> Result<Self, BackendError> {
        let config = |err: GoJsonError| BackendError::Config(format!("Backend: {err}"));
        let object = Object::parse(backend.as_str()).map_err(config)?;
        let uint = |field| object.get_uint(field).map_err(config);
        let bool = |field| Ok(object.get_bool(field).map_err(config)?.unwrap_or(false));

        let vni = uint("VNI")?.unwrap_or(1);
        if !(1..=MAX_VNI).contains(&vni) {
            return Err(out_of_range("VNI", vni, 1, MAX_VNI));
        }
        let port = uint("Port")?.unwrap_or(0);
        let port = u16::try_from(port).map_err(|_| out_of_range("Port", port, 0, 65535))?;
        let mtu = uint("MTU")?.filter(|mtu| *mtu != 0);
        if let Some(mtu) = mtu.filter(|mtu| !(MIN_MTU..=65535).contains(mtu)) {
            return Err(out_of_range("MTU", mtu, MIN_MTU, 65535));
        }
        Ok(Self {
            vni: u32::try_from(vni).map_err(|_| out_of_range("VNI", vni, 1, MAX_VNI))?,
            port: if port == 0 { DEFAULT_PORT } else { port },
            mtu: mtu.and_then(|mtu| u32::try_from(mtu).ok()),
            gbp: bool("GBP")?,
            learning: bool("Learning")?,
            direct_routing: bool("DirectRouting")?,
        })
    }

    /// These options with the [`CHANGEABLE`] ones of others.
    #[must_use]
    pub fn with_changes(self, new: &Self) -> Self {
        let Self { mtu, learning, direct_routing, .. } = *new;
        Self { mtu, learning, direct_routing, ..self }
    }
}

fn out_of_range(field: &str, value: u64, min: u64, max: u64) -> BackendError {
    BackendError::Config(format!("Backend.{field} {value} is not between {min} and {max}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VxlanOptions, BackendError> {
        VxlanOptions::parse(&RawJson::parse(text).expect("JSON"))
    }

    #[test]
    fn defaults_are_flannels() {
        let options = parse(r#"{"Type":"vxlan"}"#).expect("good");
        let defaults = VxlanOptions {
            vni: 1,
            port: 8472,
            mtu: None,
            gbp: false,
            learning: false,
            direct_routing: false,
        };
        assert_eq!(options, defaults);
    }

    #[test]
    fn keys_are_read_in_any_case() {
        let options = parse(
            r#"{"type":"vxlan","vni":7,"port":8500,"Directrouting":true,"mtu":1400,"GBP":true,"learning":true}"#,
        );
        let wanted = VxlanOptions {
            vni: 7,
            port: 8500,
            mtu: Some(1400),
            gbp: true,
            learning: true,
            direct_routing: true,
        };
        assert_eq!(options.expect("good"), wanted);
    }

    #[test]
    fn a_rejection_names_field_and_value() {
        for (text, words) in [
            (r#"{"VNI":0}"#, "VNI 0"),
            (r#"{"VNI":16777216}"#, "VNI 16777216"),
            (r#"{"Port":65536}"#, "Port 65536"),
            (r#"{"MTU":100}"#, "MTU 100"),
            (r#"{"VNI":-1}"#, "VNI"),
            (r#"{"Port":"8472"}"#, "Port"),
            (r#"{"GBP":1}"#, "GBP"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
