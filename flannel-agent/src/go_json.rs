//! JSON as Go's `encoding/json` reads and writes it.
//!
//! Configurations and lease values were always read by Go, so files in the field rely on its
//! habits: keys in any case, later duplicates winning, `null` leaving a default alone, but
//! integers strictly unquoted and integral. Specification, Appendix C.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Why JSON text or one field of it cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GoJsonError {
    /// The text is not JSON at all, or something follows the value.
    #[error("not valid JSON: {0}")]
    Syntax(String),
    /// The text is JSON, but not an object.
    #[error("{0} is not a JSON object")]
    NotAnObject(String),
    /// A field has a value of the wrong type or form.
    #[error("{field} {value}: {reason}")]
    Field {
        /// Name of the field as the specification spells it.
        field: String,
        /// The value as it stands, quotes trimmed, shortened if long.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl GoJsonError {
    /// A complaint about the value of a field.
    pub fn field(field: &str, value: impl fmt::Display, reason: impl Into<String>) -> Self {
        Self::Field { field: field.to_owned(), value: value.to_string(), reason: reason.into() }
    }
}

/// A JSON object whose fields are found the way Go finds them.
#[derive(Clone, Debug, Default)]
pub struct Object(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Object(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

impl Object {
    /// Reads an object; anything else, and anything after it, is an error.
    pub fn parse(text: &str) -> Result<Self, GoJsonError> {
        let raw: &RawValue =
            serde_json::from_str(text).map_err(|e| GoJsonError::Syntax(e.to_string()))?;
        if !raw.get().starts_with('{') {
            return Err(GoJsonError::NotAnObject(shorten(raw.get())));
        }
        serde_json::from_str(raw.get()).map_err(|e| GoJsonError::Syntax(e.to_string()))
    }

    /// The raw values given for a field, in the order in which they stand.
    fn values<'a>(&'a self, field: &'a str) -> impl DoubleEndedIterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key.eq_ignore_ascii_case(field)).map(|(_, v)| v.get())
    }

    /// The text of a field's value as it stands, `null` included; `None` if it is absent.
    pub fn get_raw<'a>(&'a self, field: &'a str) -> Option<&'a str> {
        self.values(field).next_back()
    }

    /// The last value that is not `null`: for plain fields Go lets a `null` change nothing.
    fn get_plain<'a>(&'a self, field: &'a str) -> Option<&'a str> {
        self.values(field).rfind(|value| *value != "null")
    }

    /// A string field.
    pub fn get_str(&self, field: &str) -> Result<Option<String>, GoJsonError> {
        self.get_plain(field)
            .map(|raw| {
                serde_json::from_str(raw)
                    .map_err(|_| GoJsonError::field(field, shorten(raw), "must be a string"))
            })
            .transpose()
    }

    /// A boolean field, unquoted.
    pub fn get_bool(&self, field: &str) -> Result<Option<bool>, GoJsonError> {
        self.get_plain(field)
            .map(|raw| match raw {
                "true" => Ok(true),
                "false" => Ok(false),
                _ => {
                    Err(GoJsonError::field(field, shorten(raw), "must be true or false, unquoted"))
                }
            })
            .transpose()
    }

    /// A field that holds an unsigned integer, unquoted and without fraction or exponent.
    pub fn get_uint(&self, field: &str) -> Result<Option<u64>, GoJsonError> {
        self.get_plain(field)
            .map(|raw| {
                raw.parse().map_err(|_| {
                    GoJsonError::field(
                        field,
                        shorten(raw),
                        "must be a whole number, not negative and unquoted",
                    )
                })
            })
            .transpose()
    }

    /// A field that holds an integer, unquoted and without fraction or exponent.
    pub fn get_int(&self, field: &str) -> Result<Option<i64>, GoJsonError> {
        self.get_plain(field)
            .map(|raw| {
                raw.parse().map_err(|_| {
                    GoJsonError::field(field, shorten(raw), "must be a whole number, unquoted")
                })
            })
            .transpose()
    }

    /// A field that holds an IPv4 address; `null` and `""` are errors. `0.0.0.0` is returned as is.
    pub fn get_ipv4(&self, field: &str) -> Result<Option<Ipv4Addr>, GoJsonError> {
        self.get_raw(field)
            .map(|raw| {
                parse_ipv4(unquote(raw)).ok_or_else(|| {
                    GoJsonError::field(field, shorten(unquote(raw)), "is not an IPv4 address")
                })
            })
            .transpose()
    }

    /// A nullable field that holds an IPv6 address.
    pub fn get_ipv6(&self, field: &str) -> Result<Option<Ipv6Addr>, GoJsonError> {
        self.get_raw(field)
            .filter(|raw| *raw != "null")
            .map(|raw| {
                unquote(raw).parse().map_err(|_| {
                    GoJsonError::field(field, shorten(unquote(raw)), "is not an IPv6 address")
                })
            })
            .transpose()
    }

    /// A field that holds an IPv4 network, host bits dropped; `null` and `""` are errors.
    pub fn get_ipv4_net(&self, field: &str) -> Result<Option<Ipv4Net>, GoJsonError> {
        self.get_raw(field)
            .map(|raw| {
                parse_ipv4_net(unquote(raw)).ok_or_else(|| {
                    GoJsonError::field(
                        field,
                        shorten(unquote(raw)),
                        "is not an IPv4 network (want A.B.C.D/LEN with LEN up to 32)",
                    )
                })
            })
            .transpose()
    }

    /// A field that holds an IPv6 network, host bits dropped; `null` and `""` are errors.
    pub fn get_ipv6_net(&self, field: &str) -> Result<Option<Ipv6Net>, GoJsonError> {
        self.get_raw(field)
            .map(|raw| {
                parse_ipv6_net(unquote(raw)).ok_or_else(|| {
                    GoJsonError::field(
                        field,
                        shorten(unquote(raw)),
                        "is not an IPv6 network (want ADDRESS/LEN with LEN up to 128)",
                    )
                })
            })
            .transpose()
    }

    /// Keys that match none of the known fields, in order, each once.
    pub fn unknown_keys(&self, known: &[&str]) -> Vec<String> {
        let mut unknown: Vec<String> = Vec::new();
        for (key, _) in &self.0 {
            let is_known = known.iter().any(|field| key.eq_ignore_ascii_case(field));
            if !is_known && !unknown.contains(key) {
                unknown.push(key.clone());
            }
        }
        unknown
    }
}

/// Go's address types trim the quotes off the raw JSON text instead of decoding it.
fn unquote(raw: &str) -> &str {
    raw.trim_matches('"')
}

/// A value short enough for a message.
fn shorten(value: &str) -> String {
    const MAX_CHARS: usize = 64;
    match value.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", value.get(..end).unwrap_or_default()),
        None => value.to_owned(),
    }
}

/// An IPv4 address as Go reads it: no leading zeros, IPv4-mapped IPv6 text counts.
pub fn parse_ipv4(text: &str) -> Option<Ipv4Addr> {
    text.parse().ok().or_else(|| text.parse::<Ipv6Addr>().ok()?.to_ipv4_mapped())
}

/// An IPv4 network in `ADDRESS/LEN` form, host bits dropped.
pub fn parse_ipv4_net(text: &str) -> Option<Ipv4Net> {
    let (addr, len) = text.split_once('/')?;
    Some(Ipv4Net::new(addr.parse().ok()?, parse_prefix_len(len)?).ok()?.trunc())
}

/// An IPv6 network in `ADDRESS/LEN` form, host bits dropped.
pub fn parse_ipv6_net(text: &str) -> Option<Ipv6Net> {
    let (addr, len) = text.split_once('/')?;
    Some(Ipv6Net::new(addr.parse().ok()?, parse_prefix_len(len)?).ok()?.trunc())
}

/// Decimal digits only; `str::parse` would let a plus sign pass.
pub(crate) fn parse_prefix_len(text: &str) -> Option<u8> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Checks that the text is one JSON value and drops all white space between its tokens.
pub(crate) fn compact(text: &str) -> Result<String, GoJsonError> {
    let raw: &RawValue =
        serde_json::from_str(text).map_err(|e| GoJsonError::Syntax(e.to_string()))?;
    let mut out = String::with_capacity(raw.get().len());
    let (mut in_string, mut escaped) = (false, false);
    for c in raw.get().chars() {
        if in_string {
            in_string = escaped || c != '"';
            escaped = !escaped && c == '\\';
        } else if c.is_ascii_whitespace() {
            continue;
        } else {
            in_string = c == '"';
        }
        out.push(c);
    }
    Ok(out)
}

/// Appends compact JSON, escaped the way Go does it when it embeds raw JSON. The characters
/// in question can stand only inside strings.
pub(crate) fn push_embedded(out: &mut String, json: &str) {
    for c in json.chars() {
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            c => out.push(c),
        }
    }
}

/// Appends a JSON string literal with Go's escapes.
pub(crate) fn push_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => {
                out.push_str("\\u00");
                for digit in [c as u32 >> 4, c as u32 & 0xf] {
                    out.extend(char::from_digit(digit, 16));
                }
            }
            c => push_embedded(out, c.encode_utf8(&mut [0; 4])),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn object(text: &str) -> Object {
        Object::parse(text).expect("an object")
    }

    #[test]
    fn keys_fold_and_the_last_one_wins() {
        assert_eq!(object(r#"{"vni":1,"VNI":2}"#).get_uint("VNI"), Ok(Some(2)));
        assert_eq!(object(r#"{"VNI":1,"Vni":2}"#).get_uint("VNI"), Ok(Some(2)));
        assert_eq!(object(r#"{"VNI":1,"vni":null}"#).get_uint("VNI"), Ok(Some(1)));
        assert_eq!(object(r"{}").get_uint("VNI"), Ok(None));
    }

    #[test]
    fn integers_and_booleans_are_strict() {
        for bad in ["1.0", "\"8472\"", "-1", "1e3", "true", "[1]", "18446744073709551616"] {
            let e = object(&format!(r#"{{"port":{bad}}}"#)).get_uint("Port").unwrap_err();
            assert!(e.to_string().contains("Port"), "{e}");
            assert!(e.to_string().contains(bad), "{e}");
        }
        assert_eq!(object(r#"{"a":-7}"#).get_int("A"), Ok(Some(-7)));
        for bad in ["1", "\"true\"", "0", "{}"] {
            object(&format!(r#"{{"gbp":{bad}}}"#)).get_bool("GBP").unwrap_err();
        }
        assert_eq!(object(r#"{"gbp":true}"#).get_bool("GBP"), Ok(Some(true)));
        object(r#"{"Type":1}"#).get_str("Type").unwrap_err();
    }

    #[test]
    fn only_objects_without_trailing_data() {
        for bad in ["", "{", "[]", "1", "null", "\"x\"", "{} {}", "{}x", "{\"a\":}", "{a:1}"] {
            assert!(Object::parse(bad).is_err(), "{bad}");
        }
        assert!(Object::parse(" {} \n").is_ok());
    }

    #[test]
    fn null_is_an_error_for_addresses_unless_nullable() {
        assert!(object(r#"{"a":null}"#).get_ipv4("a").is_err());
        assert!(object(r#"{"a":""}"#).get_ipv4("a").is_err());
        assert!(object(r#"{"a":null}"#).get_ipv4_net("a").is_err());
        assert_eq!(object(r#"{"a":null}"#).get_ipv6("a"), Ok(None));
        assert!(object(r#"{"a":"010.0.0.1"}"#).get_ipv4("a").is_err());
        assert_eq!(
            object(r#"{"a":"::ffff:1.2.3.4"}"#).get_ipv4("a"),
            Ok(Some(Ipv4Addr::new(1, 2, 3, 4)))
        );
    }

    #[test]
    fn networks_are_masked_and_bounded() {
        assert_eq!(parse_ipv4_net("10.77.5.9/16"), "10.77.0.0/16".parse().ok());
        assert_eq!(parse_ipv6_net("fc00:1::9/32"), "fc00:1::/32".parse().ok());
        for bad in ["10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0/8", "fd00::/8"] {
            assert_eq!(parse_ipv4_net(bad), None, "{bad}");
        }
        for bad in ["fd00::/129", "fd00::", "10.0.0.0/8", "::/-1"] {
            assert_eq!(parse_ipv6_net(bad), None, "{bad}");
        }
    }

    #[test]
    fn compaction_leaves_strings_alone() {
        assert_eq!(
            compact("{ \"a b\" : [ 1 , \"x \\\" y \\\\\" , null ] }\n").as_deref(),
            Ok(r#"{"a b":[1,"x \" y \\",null]}"#)
        );
        assert!(compact("{").is_err());
    }

    #[test]
    fn strings_are_escaped_like_go() {
        let mut out = String::new();
        push_string(&mut out, "<a>&\"\\\n\u{1}\u{2028}é");
        assert_eq!(out, "\"\\u003ca\\u003e\\u0026\\\"\\\\\\n\\u0001\\u2028é\"");
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC*", field in "[a-z]{0,3}") {
            if let Ok(object) = Object::parse(&text) {
                let _ = object.get_str(&field);
                let _ = object.get_uint(&field);
            }
            let _ = compact(&text);
            let _ = parse_ipv4_net(&text);
            let _ = parse_ipv6_net(&text);
        }

        #[test]
        fn strings_survive_a_round_trip(text in any::<String>()) {
            let mut out = String::new();
            push_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&out).ok(), Some(text));
        }
    }
}
