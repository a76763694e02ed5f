//! The dotenv dialect that `subnet.env` is read back in: comments, `export`, `=` or `:`, quotes,
//! `$VAR` and `${VAR}`. Lines that make no sense are passed over.

use std::collections::HashMap;

/// Variables by name; of several assignments the last one counts.
pub(crate) type Vars = HashMap<String, String>;

pub(crate) fn parse(text: &str) -> Vars {
    let mut vars = Vars::new();
    for line in text.lines() {
        if let Some((key, value)) = assignment(line, &vars) {
            vars.insert(key, value);
        }
    }
    vars
}

fn assignment(line: &str, vars: &Vars) -> Option<(String, String)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let line = match line.strip_prefix("export") {
        Some(rest) if rest.starts_with(char::is_whitespace) => rest,
        _ => line,
    };
    let (key, value) = line.split_once(['=', ':'])?;
    let key = key.trim();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    if key.is_empty() || !key.chars().all(is_name) {
        return None;
    }
    Some((key.to_owned(), self::value(value.trim(), vars)))
}

fn value(text: &str, vars: &Vars) -> String {
    if let Some(quoted) = text.strip_prefix('\'') {
        return quoted.split('\'').next().unwrap_or_default().to_owned();
    }
    if let Some(quoted) = text.strip_prefix('"') {
        return expand(quoted, Some('"'), vars);
    }
    let bare = match text.split_once(" #") {
        Some((bare, _)) => bare,
        None if text.starts_with('#') => "",
        None => text,
    };
    expand(bare.trim_end(), None, vars)
}

/// No value is longer, so that variables made of variables cannot grow without bound.
const MAX_VALUE: usize = 4096;

/// Replaces variables and resolves backslashes, up to the closing quote if there is one.
fn expand(text: &str, quote: Option<char>, vars: &Vars) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            c if Some(c) == quote || out.len() > MAX_VALUE => break,
            '\\' if quote.is_some() => match chars.next() {
                Some('n') => out.push('\n'),
                Some('r') => out.push('\r'),
                Some(c) => out.push(c),
                None => {}
            },
            '$' => {
                let braced = chars.next_if_eq(&'{').is_some();
                let mut name = String::new();
                while let Some(c) = chars.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
                    name.push(c);
                }
                if braced {
                    chars.next_if_eq(&'}');
                }
                if let Some(value) = vars.get(&name) {
                    out.push_str(value);
                }
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialect() {
        let vars = parse(
            "A=1\nexport B='$A #x'\nC=\"$A\\\"${A}2\" # c\nD: d\n# E=1\nF = a b # c\nG=#\nbad key=1\nexportH=1",
        );
        let get = |key: &str| vars.get(key).map(String::as_str);
        assert_eq!(get("A"), Some("1"));
        assert_eq!(get("B"), Some("$A #x"));
        assert_eq!(get("C"), Some("1\"12"));
        assert_eq!(get("D"), Some("d"));
        assert_eq!(get("E"), None);
        assert_eq!(get("F"), Some("a b"));
        assert_eq!(get("G"), Some(""));
        assert_eq!(get("exportH"), Some("1"));
        assert_eq!(vars.len(), 7);
    }

    #[test]
    fn values_stay_bounded() {
        let text = "A=xxxxxxxx\n".to_owned() + &"A=$A$A$A$A\n".repeat(64);
        assert!(parse(&text).get("A").is_some_and(|a| a.len() < 10 * MAX_VALUE));
    }
}
