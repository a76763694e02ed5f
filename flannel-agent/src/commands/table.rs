//! Aligned columns.

use serde_json::Value;

/// Rows of words with a line of headings, columns two spaces apart.
pub fn aligned(headings: &[String], rows: &[Vec<String>]) -> String {
    let lines = || std::iter::once(headings).chain(rows.iter().map(Vec::as_slice));
    let mut widths = vec![0; headings.len()];
    for line in lines() {
        for (width, word) in widths.iter_mut().zip(line) {
            *width = (*width).max(word.chars().count());
        }
    }
    let mut text = String::new();
    for line in lines() {
        let padded: Vec<_> =
            line.iter().zip(&widths).map(|(word, width)| format!("{word:<width$}")).collect();
        text.push_str(padded.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A table of JSON objects: a column for each key that occurs, in the order of its first
/// occurrence.
pub fn of_objects(objects: &[Value]) -> String {
    let mut keys: Vec<&String> = Vec::new();
    for object in objects.iter().filter_map(Value::as_object) {
        for key in object.keys() {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    let headings: Vec<_> = keys.iter().map(|key| key.to_uppercase().replace('_', " ")).collect();
    let row = |object: &Value| keys.iter().map(|key| cell(object.get(key.as_str()))).collect();
    aligned(&headings, &objects.iter().map(row).collect::<Vec<_>>())
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) if text.is_empty() => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(items)) if items.is_empty() => "-".to_owned(),
        Some(Value::Array(items)) => {
            items.iter().map(|item| cell(Some(item))).collect::<Vec<_>>().join(",")
        }
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_line_up_and_missing_values_show() {
        let text = of_objects(&[
            json!({"subnet": "10.77.3.0/24", "public_ip": "192.0.2.13", "tags": ["a", "b"]}),
            json!({"subnet": "10.77.200.0/24", "mac": null, "public_ip": "", "packets": 7}),
        ]);
        let wanted = "\
SUBNET          PUBLIC IP   TAGS  MAC  PACKETS
10.77.3.0/24    192.0.2.13  a,b   -    -
10.77.200.0/24  -           -     -    7
";
        assert_eq!(text, wanted);
    }
}
