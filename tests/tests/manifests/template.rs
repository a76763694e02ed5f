//! The part of Helm's template language that our chart uses: `if`/`else`/`end`, paths, pipes, and
//! the functions `eq`, `fail`, `nindent`, `quote` and `toYaml`. Anything else is an error, so the
//! chart cannot come to rely on what this does not know.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Renders a template. `root` is what `.` is: an object with `Values` and `Release`.
pub fn render(template: &str, root: &Value) -> Result<String> {
    let mut pieces = pieces(template)?.into_iter().peekable();
    let mut out = String::new();
    block(&mut pieces, root, true, &mut out)?;
    ensure!(pieces.next().is_none(), "an `end` or `else` too many");
    Ok(out)
}

#[derive(Debug, PartialEq)]
enum Piece<'a> {
    Text(&'a str),
    Action(&'a str),
}

type Pieces<'a> = std::iter::Peekable<std::vec::IntoIter<Piece<'a>>>;

/// Text and actions in turn, white space trimmed where an action asks for it.
fn pieces(template: &str) -> Result<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some((text, after)) = rest.split_once("{{") {
        let (action, mut behind) = after.split_once("}}").context("an action without end")?;
        let (mut text, mut action) = (text, action);
        if let Some(inner) = action.strip_prefix('-') {
            (text, action) = (text.trim_end(), inner);
        }
        if let Some(inner) = action.strip_suffix('-') {
            (behind, action) = (behind.trim_start(), inner);
        }
        pieces.extend([Piece::Text(text), Piece::Action(action.trim())]);
        rest = behind;
    }
    pieces.push(Piece::Text(rest));
    Ok(pieces)
}

/// Renders up to an `else` or `end` of the block around, which stays. What is not `shown` is only
/// read.
fn block(pieces: &mut Pieces<'_>, root: &Value, shown: bool, out: &mut String) -> Result<()> {
    loop {
        match pieces.peek() {
            None | Some(Piece::Action("else" | "end")) => return Ok(()),
            Some(Piece::Text(text)) => {
                if shown {
                    out.push_str(text);
                }
                pieces.next();
            }
            Some(Piece::Action(action)) => {
                let action = *action;
                pieces.next();
                if let Some(condition) = action.strip_prefix("if ") {
                    let yes = shown && is_true(&pipeline(condition, root)?);
                    branches(pieces, root, yes, shown && !yes, out)
                        .with_context(|| format!("in {{{{ {action} }}}}"))?;
                } else if shown {
                    let value = pipeline(action, root)?;
                    out.push_str(&text(&value).with_context(|| format!("{{{{ {action} }}}}"))?);
                }
            }
        }
    }
}

fn branches(
    pieces: &mut Pieces<'_>,
    root: &Value,
    yes: bool,
    no: bool,
    out: &mut String,
) -> Result<()> {
    block(pieces, root, yes, out)?;
    let mut next = pieces.next();
    if next == Some(Piece::Action("else")) {
        block(pieces, root, no, out)?;
        next = pieces.next();
    }
    ensure!(next == Some(Piece::Action("end")), "an `if` without `end`");
    Ok(())
}

/// Go's idea of truth.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(yes) => *yes,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

fn pipeline(text: &str, root: &Value) -> Result<Value> {
    let mut piped = None;
    for command in text.split('|') {
        piped = Some(call(&words(command)?, piped, root)?);
    }
    piped.context("an empty action")
}

/// Words apart by blanks; a string is one word, with its first quote in front.
fn words(command: &str) -> Result<Vec<&str>> {
    let mut words = Vec::new();
    let mut rest = command.trim();
    while !rest.is_empty() {
        let end = match rest.strip_prefix('"') {
            Some(inner) => inner.find('"').context("a string without end")? + 1,
            None => rest.find(char::is_whitespace).unwrap_or(rest.len()),
        };
        words.push(&rest[..end]);
        rest = rest[end..].strip_prefix('"').unwrap_or(&rest[end..]).trim_start();
    }
    Ok(words)
}

fn call(words: &[&str], piped: Option<Value>, root: &Value) -> Result<Value> {
    let (head, rest) = words.split_first().context("an empty command")?;
    let arguments: Vec<Value> =
        rest.iter().map(|word| operand(word, root)).chain(piped.map(Ok)).collect::<Result<_>>()?;
    Ok(match (*head, &arguments[..]) {
        ("eq", [a, b]) => (a == b).into(),
        ("fail", [reason]) => bail!("{}", text(reason)?),
        ("nindent", [Value::Number(depth), block]) => {
            let blanks = " ".repeat(usize::try_from(depth.as_u64().context("a depth")?)?);
            let lines: Vec<_> = text(block)?.lines().map(|l| format!("\n{blanks}{l}")).collect();
            lines.concat().into()
        }
        ("quote", [value]) => Value::from(text(value)?).to_string().into(),
        ("toYaml", [value]) => yaml(value).into(),
        (word, []) => operand(word, root)?,
        (name, arguments) => bail!("{name} with {} arguments is not known", arguments.len()),
    })
}

fn operand(word: &str, root: &Value) -> Result<Value> {
    if let Some(string) = word.strip_prefix('"') {
        return Ok(string.into());
    }
    if let Ok(number) = word.parse::<u64>() {
        return Ok(number.into());
    }
    let path = word.strip_prefix('.').with_context(|| format!("{word} is not known"))?;
    let mut value = root;
    for key in path.split('.') {
        let fields = value.as_object().with_context(|| format!("{word}: nothing to look in"))?;
        // Helm renders nothing for a missing value; here that is a slip of the pen.
        value = fields.get(key).with_context(|| format!("values.yaml has no {word}"))?;
    }
    Ok(value.clone())
}

fn text(value: &Value) -> Result<String> {
    Ok(match value {
        Value::String(text) => text.clone(),
        Value::Number(_) | Value::Bool(_) => value.to_string(),
        _ => bail!("{value} is not text"),
    })
}

/// Block style, which can go on where a list has begun.
fn yaml(value: &Value) -> String {
    let lines: Vec<String> = match value {
        Value::Object(fields) if !fields.is_empty() => fields
            .iter()
            .flat_map(|(key, value)| match value {
                Value::Object(_) | Value::Array(_) if is_true(value) => {
                    let below = yaml(value);
                    let below: Vec<_> = below.lines().map(|line| format!("  {line}")).collect();
                    [vec![format!("{key}:")], below].concat()
                }
                scalar => vec![format!("{key}: {scalar}")],
            })
            .collect(),
        Value::Array(items) if !items.is_empty() => items
            .iter()
            .flat_map(|item| {
                let item = yaml(item);
                let mark = |(n, line)| format!("{}{line}", if n == 0 { "- " } else { "  " });
                item.lines().enumerate().map(mark).collect::<Vec<_>>()
            })
            .collect(),
        scalar => vec![scalar.to_string()],
    };
    lines.join("\n")
}
