//! Go's flag syntax, rewritten into the one form clap is given: `--name=value`.

use std::ffi::{OsStr, OsString};

use super::Exit;

/// A command line cut in two where Go stops reading flags.
pub struct Line {
    /// The flags, each one word.
    pub flags: Vec<OsString>,
    /// The first word that is no flag, and all after it.
    pub rest: Vec<OsString>,
}

/// Reads words as Go's flag package does: one dash or two, `=value` or the next word, a boolean
/// takes its value only by `=`, and `--` or the first other word ends it all. What is no flag of
/// ours is handed through, so that clap can say so and suggest.
pub fn normalise(clap: &clap::Command, words: Vec<OsString>) -> Result<Line, Exit> {
    let mut flags = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let text = utf8(word)?;
        let Some(body) = text.strip_prefix('-').filter(|body| !body.is_empty()) else {
            let rest = std::iter::once(text.into()).chain(words).collect();
            return Ok(Line { flags, rest });
        };
        let body = body.strip_prefix('-').unwrap_or(body);
        if body.is_empty() {
            return Ok(Line { flags, rest: words.collect() });
        }
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (body, None),
        };
        if name.is_empty() || name.starts_with('-') {
            return Err(Exit::usage(format!("error: bad flag syntax: {text}")));
        }
        let name = if name == "h" { "help" } else { name };
        let known = clap.get_arguments().find(|arg| arg.get_long() == Some(name));
        flags.push(match (known, value) {
            (Some(_), Some(value)) => format!("--{name}={value}").into(),
            (Some(arg), None) if arg.is_require_equals_set() => format!("--{name}=true").into(),
            (Some(_), None) => match words.next() {
                Some(value) => join(name, &value),
                None => format!("--{name}").into(),
            },
            (None, _) => format!("--{name}").into(),
        });
    }
    Ok(Line { flags, rest: Vec::new() })
}

/// One word for clap.
pub fn join(name: &str, value: &OsStr) -> OsString {
    let mut word = OsString::from(format!("--{name}="));
    word.push(value);
    word
}

/// A word as text; what is not UTF-8 cannot be a flag or a value of one.
pub fn utf8(word: OsString) -> Result<String, Exit> {
    word.into_string()
        .map_err(|word| Exit::usage(format!("error: not UTF-8 text: {}", word.display())))
}

/// A boolean in the spellings of Go's `strconv.ParseBool`.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err("a boolean is 1, t, true, 0, f or false".to_owned()),
    }
}

/// An integer as Go's flags take it: a sign, then decimal, or hexadecimal, octal or binary with
/// `0x`, `0o` (or a bare `0`), `0b`; underscores between digits.
pub fn parse_int(text: &str) -> Result<i64, String> {
    let wrong = || "not an integer".to_owned();
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, body) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..]),
        [b'0', b'o', ..] => (8, &lower[2..]),
        [b'0', b'b', ..] => (2, &lower[2..]),
        [b'0', _, ..] => (8, &lower[1..]),
        _ => (10, lower.as_str()),
    };
    // An underscore may also stand between the prefix and the first digit, but nowhere else.
    let body = if radix == 10 { body } else { body.strip_prefix('_').unwrap_or(body) };
    if body.split('_').any(str::is_empty) || body.starts_with(['+', '-']) {
        return Err(wrong());
    }
    let value = i128::from_str_radix(&body.replace('_', ""), radix).map_err(|_| wrong())?;
    i64::try_from(if negative { -value } else { value })
        .map_err(|_| "out of the range of 64 bits".to_owned())
}

/// A port: at most 65535. Zero and less mean "off" for flanneld.
pub fn parse_port(text: &str) -> Result<i64, String> {
    let port = parse_int(text)?;
    if port > i64::from(u16::MAX) {
        return Err("a port is at most 65535".to_owned());
    }
    Ok(port)
}
