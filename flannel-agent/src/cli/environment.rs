//! Options from environment variables: specification §1.2.

use std::ffi::OsString;

use super::{Environment, Note, go_syntax, parse_words};

/// Prefix of the variable of every flag.
pub const PREFIX: &str = "FLANNELD_";

/// The variable that stands for a flag.
pub fn variable(flag: &str) -> String {
    format!("{PREFIX}{}", flag.to_ascii_uppercase().replace('-', "_"))
}

/// Appends to `words` a flag for each variable that is set, not empty, and whose flag is not on
/// the command line already. A value that does not parse is left out and noted.
pub fn overlay(clap: &clap::Command, words: &mut Vec<OsString>, env: Environment<'_>) -> Vec<Note> {
    let mut notes = Vec::new();
    let mut extra = Vec::new();
    for name in clap.get_arguments().filter_map(clap::Arg::get_long) {
        // Neither is an option: upstream looks at them before it looks at the environment.
        if name == "version" || name == "help" || given(words, name) {
            continue;
        }
        let variable = variable(name);
        let Some(value) = env(&variable).filter(|value| !value.is_empty()) else { continue };
        let word = go_syntax::join(name, &value);
        match parse_words(clap, std::slice::from_ref(&word)) {
            Ok(_) => extra.push(word),
            Err(exit) => {
                notes
                    .push(Note::Error(format!("{variable} is ignored: {}", reason(&exit.message))));
            }
        }
    }
    words.append(&mut extra);
    notes
}

fn given(words: &[OsString], name: &str) -> bool {
    words.iter().filter_map(|word| word.to_str()).any(|word| {
        let body = word.strip_prefix("--").unwrap_or(word);
        body.split('=').next() == Some(name)
    })
}

/// Clap's message without its frame, in one line.
fn reason(message: &str) -> String {
    let body = message.split("\n\nFor more information").next().unwrap_or(message);
    let words: Vec<_> = body.strip_prefix("error: ").unwrap_or(body).split_whitespace().collect();
    words.join(" ")
}
