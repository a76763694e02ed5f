//! Netlink's form: messages, and attributes in them.

/// Attributes: type and content.
#[derive(Clone)]
pub struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    /// The attributes in a payload.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The first attribute of a type.
    pub fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.clone().find(|(found, _)| *found == kind).map(|(_, content)| content)
    }

    /// The attributes nested in one.
    pub fn nested(&self, kind: u16) -> Self {
        Self(self.get(kind).unwrap_or_default())
    }

    /// A string without its final zero; empty if absent.
    pub fn text(&self, kind: u16) -> String {
        let bytes = self.get(kind).unwrap_or_default();
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    /// A number in network byte order.
    pub fn number(&self, kind: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.get(kind)?.try_into().ok()?))
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header = self.0.get(..4)?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        // The upper bits say "nested" and "network byte order".
        let kind = u16::from_ne_bytes([header[2], header[3]]) & 0x3fff;
        let content = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, content))
    }
}

/// What stands in front of each message, as far as it matters here.
pub struct Header {
    /// `nlmsg_type`.
    pub kind: u16,
    /// `nlmsg_flags`.
    pub flags: u16,
    /// `nlmsg_seq`.
    pub sequence: u32,
}

/// The messages of a datagram, each with what is behind its netlink header.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    std::iter::from_fn(move || {
        let head = bytes.get(..16)?;
        let word =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
        let length = word(0) as usize;
        let payload = bytes.get(16..length)?;
        let header = Header { kind: half(4), flags: half(6), sequence: word(8) };
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((header, payload))
    })
}

/// Appends an attribute.
pub fn attribute(buffer: &mut Vec<u8>, kind: u16, content: &[u8]) {
    let length = u16::try_from(4 + content.len()).unwrap_or(u16::MAX);
    buffer.extend(length.to_ne_bytes());
    buffer.extend(kind.to_ne_bytes());
    buffer.extend(content);
    buffer.resize(buffer.len().next_multiple_of(4), 0);
}

/// A string as the kernel wants it.
pub fn zero_terminated(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_of_any_bytes_end() {
        let mut bytes = Vec::new();
        attribute(&mut bytes, 1, b"nat\0");
        attribute(&mut bytes, 2, &7_u32.to_be_bytes());
        let attributes = Attributes::new(&bytes);
        assert_eq!(attributes.text(1), "nat");
        assert_eq!(attributes.number(2), Some(7));
        for cut in 0..bytes.len() {
            assert!(Attributes::new(&bytes[..cut]).count() <= 2);
        }
        assert_eq!(Attributes::new(&[0; 64]).count(), 0, "lengths of zero");
        assert_eq!(messages(&[0xff; 64]).count(), 0);
    }
}
