//! A command as the configuration gives it, and the words it becomes.

use serde_json::Value;

use crate::{backend::BackendError, go_json::Object};

/// A command. Never run by a shell, unless it names one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// Never empty.
    words: Vec<String>,
    /// Whether variables are replaced in every word.
    expand: bool,
}

impl Words {
    /// Reads an option: a string is split at white space and variables are replaced in its words,
    /// as flannel does it; a list of strings is the program and its arguments as they stand, so
    /// that a shell's `$` is the shell's. `None` if there is no command.
    ///
    /// # Errors
    /// [`BackendError::Config`] naming the field and the value.
    pub fn parse(object: &Object, field: &str) -> Result<Option<Self>, BackendError> {
        let Some(raw) = object.get_raw(field) else { return Ok(None) };
        let unusable = || {
            BackendError::Config(format!(
                "Backend.{field} is {raw}; it has to be a string, which is split at white space, \
                 or a list of strings"
            ))
        };
        let value: Value = serde_json::from_str(raw).map_err(|_| unusable())?;
        let expand = matches!(value, Value::String(_));
        let words: Vec<String> = match value {
            Value::Null => Vec::new(),
            Value::String(text) => text.split_whitespace().map(str::to_owned).collect(),
            Value::Array(words) => {
                let words = words.into_iter().map(|word| match word {
                    Value::String(word) => Some(word),
                    _ => None,
                });
                words.collect::<Option<_>>().ok_or_else(unusable)?
            }
            _ => return Err(unusable()),
        };
        Ok((!words.is_empty()).then_some(Self { words, expand }))
    }

    /// Program and arguments, with `$NAME` and `${NAME}` replaced if they came as a string.
    pub fn argv(&self, lookup: impl Fn(&str) -> String) -> Vec<String> {
        if !self.expand {
            return self.words.clone();
        }
        self.words.iter().map(|word| expand(word, &lookup)).collect()
    }

    /// The program as it stands in the configuration, for messages: arguments may hold secrets.
    pub fn program(&self) -> &str {
        &self.words[0]
    }
}

/// Replaces variables as Go's `os.Expand` does: a dollar sign before no name stays, a brace
/// without its partner or around nothing goes, and the shell's one-character names are names.
fn expand(word: &str, lookup: &impl Fn(&str) -> String) -> String {
    let mut out = String::with_capacity(word.len());
    let mut rest = word;
    while let Some(at) = rest.find('$') {
        let (before, after) = (&rest[..at], &rest[at + 1..]);
        if after.is_empty() {
            break;
        }
        out.push_str(before);
        let (name, used) = variable(after);
        match name {
            Some(name) => out.push_str(&lookup(name)),
            None if used == 0 => out.push('$'),
            None => {}
        }
        rest = &after[used..];
    }
    out.push_str(rest);
    out
}

/// The name at the start of the text after a dollar sign, and how many bytes belong to it.
fn variable(text: &str) -> (Option<&str>, usize) {
    let special = |c: char| c.is_ascii_digit() || "*#$@!?-".contains(c);
    if let Some(inner) = text.strip_prefix('{') {
        return match inner.find('}') {
            Some(0) => (None, 2),
            Some(end) => (Some(&inner[..end]), end + 2),
            None => (None, 1),
        };
    }
    if text.starts_with(special) {
        return (Some(&text[..1]), 1);
    }
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    if end == 0 { (None, 0) } else { (Some(&text[..end]), end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(command: &str) -> Result<Option<Words>, BackendError> {
        let object = Object::parse(&format!(r#"{{"SubnetAddCommand":{command}}}"#)).expect("JSON");
        Words::parse(&object, "SubnetAddCommand")
    }

    #[test]
    fn a_string_is_split_and_a_list_is_not() {
        for (text, words) in [
            (r#""ip route  add $SUBNET""#, Some(&["ip", "route", "add", "<SUBNET>"][..])),
            // No shell: quotes and pipes are words like others.
            (r#""echo 'a b' | cat""#, Some(&["echo", "'a", "b'", "|", "cat"])),
            (r#"["sh","-c","echo $SUBNET",""]"#, Some(&["sh", "-c", "echo $SUBNET", ""])),
            (r#""""#, None),
            (r#""  ""#, None),
            ("[]", None),
            ("null", None),
        ] {
            let argv = |words: Words| words.argv(|name| format!("<{name}>"));
            let parsed = parse(text).expect(text).map(argv);
            let words = words.map(|words| words.iter().map(|w| (*w).to_owned()).collect());
            assert_eq!(parsed, words, "{text}");
        }
        for text in ["1", r#"["echo",1]"#, "{}"] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains("SubnetAddCommand") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn variables_are_replaced_as_go_does_it() {
        let lookup = |name: &str| match name {
            "SUBNET" => "10.5.1.0/24".to_owned(),
            "1" => "one".to_owned(),
            _ => String::new(),
        };
        for (word, expanded) in [
            ("$SUBNET", "10.5.1.0/24"),
            ("<${SUBNET}>", "<10.5.1.0/24>"),
            ("$SUBNET/x", "10.5.1.0/24/x"),
            ("$SUBNETS", ""),
            ("$1a", "onea"),
            ("a$", "a$"),
            ("$.x", "$.x"),
            ("${}x", "x"),
            ("${SUBNET", "SUBNET"),
            ("$ä", "$ä"),
        ] {
            assert_eq!(expand(word, &lookup), expanded, "{word}");
        }
    }
}
