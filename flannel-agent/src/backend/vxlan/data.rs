//! What vxlan nodes publish about themselves: VNI and the VTEP's MAC.

use crate::{
    go_json::{GoJsonError, Object},
    lease::RawJson,
    mac::MacAddr,
};

/// The backend data of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VxlanData {
    /// VXLAN network identifier. Peers' values are not compared with ours, as upstream does not.
    pub vni: u32,
    /// The inner MAC that the node's VXLAN device accepts.
    pub vtep_mac: MacAddr,
}

/// Why backend data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// Malformed JSON or a field of the wrong type.
    #[error(transparent)]
    Format(#[from] GoJsonError),
    /// No MAC, or none that a station can have. Windows nodes publish an empty one at first.
    #[error("VtepMAC \"{0}\" is not the MAC of a device")]
    Mac(String),
}

impl VxlanData {
    /// Reads backend data.
    pub fn parse(data: &RawJson) -> Result<Self, DataError> {
        let object = Object::parse(data.as_str())?;
        let vni = object.get_uint("VNI")?.and_then(|vni| u32::try_from(vni).ok()).unwrap_or(0);
        let text = object.get_str("VtepMAC")?.unwrap_or_default();
        match MacAddr::parse(&text) {
            Some(vtep_mac) if vtep_mac.is_station() => Ok(Self { vni, vtep_mac }),
            _ => Err(DataError::Mac(text)),
        }
    }

    /// The text to publish, to the byte: real flannel looks for the MAC with string operations
    /// (specification §5.3).
    pub fn to_json(self) -> RawJson {
        RawJson::from_compact(format!(r#"{{"VNI":{},"VtepMAC":"{}"}}"#, self.vni, self.vtep_mac))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VxlanData, DataError> {
        VxlanData::parse(&RawJson::parse(text).expect("JSON"))
    }

    #[test]
    fn the_published_text_is_exactly_flannels() {
        let data = VxlanData { vni: 1, vtep_mac: MacAddr([0x12, 0xc6, 0x65, 0x89, 0xb4, 0xe3]) };
        assert_eq!(data.to_json().as_str(), r#"{"VNI":1,"VtepMAC":"12:c6:65:89:b4:e3"}"#);
        assert_eq!(parse(data.to_json().as_str()).expect("good"), data);
    }

    #[test]
    fn unusable_macs_are_refused_with_their_text() {
        for text in ["", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00", "rubbish", "02:fa:00:00:00"] {
            let error = parse(&format!(r#"{{"VNI":1,"VtepMAC":"{text}"}}"#)).expect_err(text);
            assert!(error.to_string().contains(&format!("\"{text}\"")), "{error}");
        }
        assert!(parse(r#"{"VNI":1}"#).is_err());
        assert!(parse("7").is_err());
    }
}
