//! Any JSON value the way Go writes one that it decoded into `interface{}`: keys sorted, numbers
//! by way of `float64`, no white space, `<`, `>` and `&` escaped. The delegate's configuration
//! and the scratch file are such texts.

use serde_json::Value;

use crate::go_json::push_string;

/// The value as Go's `json.Marshal` writes it. What stands at `typed`, a path of keys, are objects
/// of a Go type: their fields keep their order.
pub fn encode(value: &Value, typed: &[&str]) -> String {
    let mut out = String::new();
    push(&mut out, value, Some(typed).filter(|path| !path.is_empty()));
    out
}

/// `typed` is what is left of the path to the unsorted objects: empty in them, `None` elsewhere.
fn push(out: &mut String, value: &Value, typed: Option<&[&str]>) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => match number.as_f64() {
            Some(number) => push_float(out, number),
            None => out.push_str(&number.to_string()),
        },
        Value::String(text) => push_string(out, text),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                push(out, item, typed);
            }
            out.push(']');
        }
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            if typed != Some(&[]) {
                entries.sort_unstable_by_key(|(key, _)| key.as_bytes());
            }
            out.push('{');
            for (index, (key, value)) in entries.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                push_string(out, key);
                out.push(':');
                let below = typed.and_then(|path| match path.split_first() {
                    Some((first, rest)) => (key == first).then_some(rest),
                    None => Some(path),
                });
                push(out, value, below);
            }
            out.push('}');
        }
    }
}

/// Shortest digits that read back the same; with an exponent from 1e21 on and below 1e-6.
fn push_float(out: &mut String, number: f64) {
    let size = number.abs();
    if size == 0.0 || (1e-6..1e21).contains(&size) {
        out.push_str(&number.to_string());
        return;
    }
    let text = format!("{number:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return out.push_str(&text) };
    out.push_str(digits);
    out.push('e');
    if !exponent.starts_with('-') {
        out.push('+');
    }
    out.push_str(exponent);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Go's `json.Unmarshal` into `interface{}` and `json.Marshal` make of a text.
    #[test]
    fn texts_come_out_as_from_go() {
        for (text, wanted) in [
            (r#"{ "b": 1, "a": [true, null, "x<y"] }"#, r#"{"a":[true,null,"x\u003cy"],"b":1}"#),
            (r#"{"mtu":1450.0,"n":1e3,"m":-0.5}"#, r#"{"m":-0.5,"mtu":1450,"n":1000}"#),
            ("[1e21,1.5e-7,100000000000000000000]", "[1e+21,1.5e-7,100000000000000000000]"),
            ("[12345678901234567890,-0.0]", "[12345678901234567000,-0]"),
            (r#"{"a":1,"a":2,"Z":{},"_":[]}"#, r#"{"Z":{},"_":[],"a":2}"#),
        ] {
            let value: Value = serde_json::from_str(text).expect("JSON");
            assert_eq!(encode(&value, &[]), wanted);
        }
    }

    #[test]
    fn typed_objects_keep_their_order() {
        let value = serde_json::json!({"b": {"r": [{"z": 1, "a": 2}], "q": {"z": 1, "a": 2}}});
        assert_eq!(encode(&value, &["b", "r"]), r#"{"b":{"q":{"a":2,"z":1},"r":[{"z":1,"a":2}]}}"#);
    }
}
